# images -> crops -> latents. Shards lie beside their manifest, undeclared: those that are up to date are not made again.


rule crop:
    input:
        config=config_of("crop"),
        source=f"{results}/datasets/{{dataset}}/source.json",
    output:
        manifest=f"{results}/datasets/{{dataset}}/crops/manifest.json",
    log:
        "logs/datasets/{dataset}/crop.log",
    benchmark:
        "benchmarks/datasets/{dataset}/crop.tsv"
    retries: attempts(2)
    conda:
        "../../envs/image-diffusion.yaml"
    threads: 4
    resources:
        nodes=1,
        cpus_per_task=4,
        mem_mb=8000,
        runtime=240,
    params:
        journal=f"{results}/datasets/{{dataset}}/journal",
    shell:
        "logged {log:q} python -m image_diffusion.crop --config {input.config:q} --source {input.source:q}"
        " --output {output.manifest:q} --journal {params.journal:q}"
        # Slurm knows what it gave; Snakemake caps its threads at the cores of the machine it was started on.
        " --processes ${{SLURM_CPUS_PER_TASK:-{threads}}}"


# A large data set is encoded by several jobs, a part each; `encode` then finds every shard in place.
rule encode_part:
    input:
        config=config_of("encode"),
        before=configs_before("encode"),
        data=f"{results}/datasets/{{dataset}}/crops/manifest.json",
        codec=codec_weights,
    output:
        mark=f"{results}/datasets/{{dataset}}/{{codec}}/part-{{part}}-of-{{parts}}.done",
    log:
        "logs/datasets/{dataset}/encode-{codec}/part-{part}-of-{parts}.log",
    benchmark:
        "benchmarks/datasets/{dataset}/encode-{codec}/part-{part}-of-{parts}.tsv"
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
        codec=codec_option,
    shell:
        "logged {log:q} python -m image_diffusion.encode --config {input.config:q} --data {input.data:q}"
        " {params.codec:q} --part {wildcards.part}/{wildcards.parts} --output {output.mark:q}"


rule encode:
    input:
        config=config_of("encode"),
        before=configs_before("encode"),
        data=f"{results}/datasets/{{dataset}}/crops/manifest.json",
        codec=codec_weights,
        parts=encoded_parts,
    output:
        manifest=f"{results}/datasets/{{dataset}}/{{codec}}/manifest.json",
    log:
        "logs/datasets/{dataset}/encode-{codec}.log",
    benchmark:
        "benchmarks/datasets/{dataset}/encode-{codec}.tsv"
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
        codec=codec_option,
        journal=f"{results}/datasets/{{dataset}}/journal",
    shell:
        "logged {log:q} python -m image_diffusion.encode --config {input.config:q} --data {input.data:q}"
        " {params.codec:q} --output {output.manifest:q} --journal {params.journal:q}"
