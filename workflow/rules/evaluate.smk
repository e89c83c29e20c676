# a trained model, and the images it made where it makes any -> numbers with intervals

judges = files.inputs("detector", "references", "reference")


rule evaluate:
    "Numbers with intervals: how good the trained model, or what it makes, is."
    input:
        **files.of_model("evaluate", before="evaluate"),
        **judges,
        **files.inputs("samples", "encoded", "judged_pairs"),
        made_with=files.made_with,
        data=files.real_data,
    output:
        metrics=shown(f"{results}/{{experiment}}/metrics.json", "metrics", "Metrics", experiment="{experiment}"),
        pictures=report(
            directory(f"{results}/{{experiment}}/evaluation"),
            patterns=["{picture}.png"],
            category="Evaluation",
            labels={"experiment": "{experiment}", "picture": "{picture}"},
            caption="../report/evaluation.rst",
        ),
    log:
        "logs/{experiment}/evaluate.log",
    benchmark:
        "benchmarks/{experiment}/evaluate.tsv"
    group:
        machine.shared_job
    conda:
        "../../envs/image-diffusion.yaml"
    threads: machine.threads
    resources:
        **machine.one_process(),
    params:
        **files.options("trained_by", "encoded", "detector", "references", "reference", "samples", "judged_pairs"),
        devices=machine.devices_option,
        code=code["evaluate"],
        other_weights=files.detector_stamps,
        data=subpath(input.data, parent=True),
        making=files.sampling_options,
        page=lambda wildcards, output: [
            "--previews",
            f"{results}/{wildcards.experiment}/train/previews",
            "--report",
            output.pictures,
            "--journal",
            f"{results}/{wildcards.experiment}/journal",
        ],
    shell:
        "exec logged {params.devices:q} {log:q} python -m image_diffusion evaluate --config {input.config:q}"
        " --weights {input.weights:q} {params.trained_by:q} {params.samples:q} {params.making:q} --data {params.data:q}"
        " {params.encoded:q} {params.detector:q} {params.references:q} {params.reference:q} {params.page:q}"
        " {params.judged_pairs:q} --output {output.metrics:q}"
