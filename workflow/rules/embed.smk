# crops and captions, or the embeddings of others -> pairs of image and text embeddings, what a prior learns from


rule embed:
    input:
        config=config_of("embed"),
        before=configs_before("embed"),
        data=pair_sources,
        detector=pair_detector,
    output:
        manifest=f"{results}/datasets/{{dataset}}/{{pairs}}/manifest.json",
    log:
        "logs/datasets/{dataset}/embed-{pairs}.log",
    benchmark:
        "benchmarks/datasets/{dataset}/embed-{pairs}.tsv"
    retries: attempts(2)
    conda:
        "../../envs/image-diffusion.yaml"
    threads: local_threads(asked("cpus_per_process"))
    resources:
        nodes=1,
        gres=one_gpu,
        cpus_per_task=asked("cpus_per_process"),
        mem_mb=asked("memory_mb"),
        runtime=asked("runtime_min"),
    params:
        options=pair_options,
        journal=f"{results}/datasets/{{dataset}}/journal",
    shell:
        "logged {log:q} python -m image_diffusion.embed --config {input.config:q} {params.options:q}"
        " --output {output.manifest:q} --journal {params.journal:q}"
