# crops -> what a detector sees in them: looked at once, for all experiments, curves and previews that are compared


# A large data set is looked at by several jobs, a part each; `reference` then joins them, and the parts go.
rule reference_part:
    "What a detector sees in a part of the images: a large data set is looked at by several jobs."
    input:
        config=files.reference_config,
        data=f"{results}/datasets/{{dataset}}/crops/manifest.json",
        detector=files.reference_detector,
    output:
        seen=temp(f"{results}/datasets/{{dataset}}/references/{{judge}}/parts/part-{{part}}-of-{{parts}}.npz"),
    log:
        "logs/datasets/{dataset}/reference-{judge}/part-{part}-of-{parts}.log",
    benchmark:
        "benchmarks/datasets/{dataset}/reference-{judge}/part-{part}-of-{parts}.tsv"
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
        code=code["reference"],
        detector=files.reference_detector_option,
        data=subpath(input.data, parent=True),
    shell:
        "exec logged {params.devices:q} {log:q} python -m image_diffusion.reference --config {input.config:q} --data {params.data:q}"
        " {params.detector:q} --part {wildcards.part}/{wildcards.parts} --output {output.seen:q}"


rule reference:
    "What a detector sees in the images of a data set: once, for all that is compared with them."
    input:
        config=files.reference_config,
        data=f"{results}/datasets/{{dataset}}/crops/manifest.json",
        detector=files.reference_detector,
        parts=files.reference_parts,
    output:
        description=f"{results}/datasets/{{dataset}}/references/{{judge}}/reference.json",
    log:
        "logs/datasets/{dataset}/reference-{judge}.log",
    benchmark:
        "benchmarks/datasets/{dataset}/reference-{judge}.tsv"
    retries: machine.attempts(2)
    group:
        machine.shared_job
    conda:
        "../../envs/image-diffusion.yaml"
    threads: machine.threads
    resources:
        gres=machine.one_gpu_to_begin,
        devices=machine.one_device_to_begin,
        cpus_per_task=machine.cpus,
        mem_mb=machine.memory_mb,
        runtime=machine.runtime_min,
    params:
        devices=machine.devices_option,
        code=code["reference"],
        detector=files.reference_detector_option,
        parts=files.made_option,
        data=subpath(input.data, parent=True),
        output=subpath(output.description, parent=True),
    shell:
        "exec logged {params.devices:q} {log:q} python -m image_diffusion.reference --config {input.config:q} --data {params.data:q}"
        " {params.detector:q} {params.parts:q} --output {params.output:q}"
