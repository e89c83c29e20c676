# a trained model, and the images it made where it makes any -> numbers with intervals


rule evaluate:
    "Numbers with intervals: how good the trained model, or what it makes, is."
    input:
        config=files.config("evaluate"),
        before=files.configs_before("evaluate"),
        weights=f"{results}/{{experiment}}/train/weights.safetensors",
        model=f"{results}/{{experiment}}/train/model.json",
        samples=files.samples,
        made_with=files.made_with,
        data=files.real_data,
        encoded=files.judged_on,
        detector=files.detector,
        references=files.references,
        reference=files.reference,
    output:
        metrics=report(
            f"{results}/{{experiment}}/metrics.json",
            category="Metrics",
            labels={"experiment": "{experiment}"},
            caption="../report/metrics.rst",
        ),
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
    retries: machine.attempts(2)
    group:
        machine.shared_job
    conda:
        "../../envs/image-diffusion.yaml"
    threads: machine.threads
    resources:
        gres=machine.one_gpu,
        devices=machine.one_device,
        cpus_per_task=machine.cpus,
        mem_mb=machine.memory_mb,
        runtime=machine.runtime_min,
    params:
        devices=machine.devices_option,
        code=code["evaluate"],
        trained_by=files.trained_by_option,
        encoded=files.judged_on_option,
        detector=files.detector_option,
        references=files.references_option,
        reference=files.reference_option,
        data=subpath(input.data, parent=True),
        previews=f"{results}/{{experiment}}/train/previews",
        samples=files.samples_option,
        making=files.making_option,
        journal=f"{results}/{{experiment}}/journal",
    shell:
        "exec logged {params.devices:q} {log:q} python -m image_diffusion.evaluate --config {input.config:q} --weights {input.weights:q}"
        " {params.trained_by:q}"
        " {params.samples:q} {params.making:q} --data {params.data:q} {params.encoded:q} {params.detector:q} {params.references:q}"
        " {params.reference:q} --previews {params.previews:q}"
        " --report {output.pictures:q} --output {output.metrics:q} --journal {params.journal:q}"
