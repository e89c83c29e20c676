# crops -> what a detector sees in them: looked at once, for all experiments, curves and previews that are compared


rule reference:
    "What a detector sees in the images of a data set: once, for all that is compared with them."
    input:
        config=lambda wildcards: plans.references[wildcards.dataset, wildcards.judge],
        data=f"{results}/datasets/{{dataset}}/crops/manifest.json",
        detector=files.reference_detector,
        parts=parts.reference_parts,
    output:
        description=f"{results}/datasets/{{dataset}}/references/{{judge}}/reference.json",
    log:
        "logs/datasets/{dataset}/reference-{judge}.log",
    benchmark:
        "benchmarks/datasets/{dataset}/reference-{judge}.tsv"
    group:
        machine.shared_job
    conda:
        "../../envs/image-diffusion.yaml"
    threads: machine.threads
    resources:
        **machine.joining(),
    params:
        devices=machine.devices_option,
        code=code["reference"],
        detector=files.reference_detector_option,
        other_weights=files.reference_stamps,
        parts=parts.parts_option,
        part=parts.part_option,
        data=subpath(input.data, parent=True),
        output=subpath(output.description, parent=True),
    shell:
        "exec logged {params.devices:q} {log:q} python -m image_diffusion reference --config {input.config:q}"
        " --data {params.data:q} {params.detector:q} {params.parts:q} {params.part:q} --output {params.output:q}"


use rule reference as reference_part with:
    "What a detector sees in a part of the images; `reference` then joins the parts, and they go."
    output:
        seen=temp(f"{results}/datasets/{{dataset}}/references/{{judge}}/parts/part-{{part}}-of-{{parts}}.npz"),
    log:
        "logs/datasets/{dataset}/reference-{judge}/part-{part}-of-{parts}.log",
    benchmark:
        "benchmarks/datasets/{dataset}/reference-{judge}/part-{part}-of-{parts}.tsv"
    params:
        output=f"{results}/datasets/{{dataset}}/references/{{judge}}/parts/part-{{part}}-of-{{parts}}.npz",
