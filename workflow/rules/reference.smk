# crops -> what a detector sees in them: looked at once, for all experiments, curves and previews that are compared


rule reference:
    "What a detector sees in the images of a data set: once, for all that is compared with them."
    input:
        config=files.reference_config,
        data=f"{results}/datasets/{{dataset}}/crops/manifest.json",
        detector=files.reference_detector,
    output:
        description=f"{results}/datasets/{{dataset}}/references/{{judge}}/reference.json",
    log:
        "logs/datasets/{dataset}/reference-{judge}.log",
    benchmark:
        "benchmarks/datasets/{dataset}/reference-{judge}.tsv"
    retries: machine.attempts(2)
    conda:
        "../../envs/image-diffusion.yaml"
    threads: machine.threads
    resources:
        nodes=1,
        gres=machine.one_gpu,
        cpus_per_task=machine.cpus,
        mem_mb=machine.memory_mb,
        runtime=machine.runtime_min,
    params:
        code=code["reference"],
        detector=files.reference_detector_option,
        data=subpath(input.data, parent=True),
        output=subpath(output.description, parent=True),
    shell:
        "exec logged {log:q} python -m image_diffusion.reference --config {input.config:q} --data {params.data:q}"
        " {params.detector:q} --output {params.output:q}"
