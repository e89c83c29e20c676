# crops -> a small classifier: what the metrics look at images with, where no published network fits


rule detect:
    input:
        config=config_of("crop"),
        data=f"{results}/datasets/{{dataset}}/crops/manifest.json",
    output:
        description=f"{results}/datasets/{{dataset}}/detector/detector.json",
        weights=f"{results}/datasets/{{dataset}}/detector/detector.safetensors",
    log:
        "logs/datasets/{dataset}/detect.log",
    benchmark:
        "benchmarks/datasets/{dataset}/detect.tsv"
    retries: attempts(2)
    conda:
        "../../envs/image-diffusion.yaml"
    threads: local_threads(asked("cpus_per_process"))
    resources:
        nodes=1,
        gres=one_gpu,
        cpus_per_task=asked("cpus_per_process"),
        mem_mb=asked("memory_mb"),
        runtime=60,
    params:
        code=code["detect"],
        data=lambda wildcards, input: Path(input.data).parent,
        output=lambda wildcards, output: Path(output.description).parent,
    shell:
        "logged {log:q} python -m image_diffusion.detect --data {params.data:q} --output {params.output:q}"
