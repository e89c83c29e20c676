# images -> crops -> latents. Shards lie beside their manifest, undeclared: those that are up to date are not made again.


# A very large data set is cropped by several jobs, a part each; `crop` then finds every shard in place.
rule crop_part:
    "Square images of a part of a data set: a very large one is cropped by several jobs."
    input:
        config=files.config("crop"),
        source=f"{results}/datasets/{{dataset}}/source.json",
    output:
        note=f"{results}/datasets/{{dataset}}/crops/part-{{part}}-of-{{parts}}.json",
    log:
        "logs/datasets/{dataset}/crop/part-{part}-of-{parts}.log",
    benchmark:
        "benchmarks/datasets/{dataset}/crop/part-{part}-of-{parts}.tsv"
    retries: machine.attempts(2)
    conda:
        "../../envs/image-diffusion.yaml"
    threads: 4
    resources:
        cpus_per_task=4,
        mem_mb=files.crop_memory_mb,
        runtime=files.crop_runtime_min,
    shell:
        "exec logged {log:q} python -m image_diffusion.crop --config {input.config:q}"
        " --part {wildcards.part}/{wildcards.parts} --output {output.note:q}"
        # Slurm knows what it gave; Snakemake caps its threads at the cores of the machine it was started on.
        " --processes ${{SLURM_CPUS_PER_TASK:-{threads}}}"


rule crop:
    "Images of a data set: cut to squares of one size as ADM does, in webdataset shards; what cannot be read is listed."
    input:
        config=files.config("crop"),
        source=f"{results}/datasets/{{dataset}}/source.json",
        parts=files.cropped_parts,
    output:
        manifest=f"{results}/datasets/{{dataset}}/crops/manifest.json",
    log:
        "logs/datasets/{dataset}/crop.log",
    benchmark:
        "benchmarks/datasets/{dataset}/crop.tsv"
    retries: machine.attempts(2)
    group:
        machine.shared_job
    conda:
        "../../envs/image-diffusion.yaml"
    threads: 4
    resources:
        cpus_per_task=4,
        mem_mb=files.crop_memory_mb,
        runtime=files.crop_runtime_min,
    params:
        journal=f"{results}/datasets/{{dataset}}/journal",
        parts=files.cropped_option,
    shell:
        "exec logged {log:q} python -m image_diffusion.crop --config {input.config:q} --source {input.source:q}"
        " {params.parts:q} --output {output.manifest:q} --journal {params.journal:q}"
        " --processes ${{SLURM_CPUS_PER_TASK:-{threads}}}"


rule datasheet:
    "What somebody should look at in a data set before training: a page, and the same as JSON."
    input:
        config=files.config("crop"),
        data=f"{results}/datasets/{{dataset}}/crops/manifest.json",
    output:
        sheet=f"{results}/datasets/{{dataset}}/datasheet/datasheet.json",
        page=report(
            f"{results}/datasets/{{dataset}}/datasheet/index.html",
            category="Data",
            labels={"data set": "{dataset}"},
            caption="../report/datasheet.rst",
        ),
    log:
        "logs/datasets/{dataset}/datasheet.log",
    benchmark:
        "benchmarks/datasets/{dataset}/datasheet.tsv"
    group:
        machine.shared_job
    conda:
        "../../envs/image-diffusion.yaml"
    threads: 4
    resources:
        cpus_per_task=4,
        mem_mb=8000,
        runtime=files.crop_runtime_min,
    params:
        code=code["datasheet"],
        journal=f"{results}/datasets/{{dataset}}/journal",
    shell:
        "exec logged {log:q} python -m image_diffusion.datasheet --config {input.config:q} --data {input.data:q}"
        " --output {output.sheet:q} --journal {params.journal:q} --processes ${{SLURM_CPUS_PER_TASK:-{threads}}}"


# A large data set is encoded by several jobs, a part each; `encode` then finds every shard in place.
rule encode_part:
    "Latents of a part of the crops: a large data set is encoded by several jobs."
    input:
        config=files.config("encode"),
        before=files.configs_before("encode"),
        data=files.to_encode,
        codec=files.codec_weights,
    output:
        mark=temp(f"{results}/datasets/{{dataset}}/{{codec}}/part-{{part}}-of-{{parts}}.done"),
    log:
        "logs/datasets/{dataset}/encode-{codec}/part-{part}-of-{parts}.log",
    benchmark:
        "benchmarks/datasets/{dataset}/encode-{codec}/part-{part}-of-{parts}.tsv"
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
        codec=files.codec_option,
        published=files.codec_stamps,
    shell:
        "exec logged {params.devices:q} {log:q} python -m image_diffusion.encode --config {input.config:q} --data {input.data:q}"
        " {params.codec:q} --part {wildcards.part}/{wildcards.parts} --output {output.mark:q}"


rule encode:
    "Latents of the crops, as the codec of the experiment makes them, in shards."
    input:
        config=files.config("encode"),
        before=files.configs_before("encode"),
        data=files.to_encode,
        codec=files.codec_weights,
        parts=files.encoded_parts,
    output:
        manifest=f"{results}/datasets/{{dataset}}/{{codec}}/manifest.json",
    log:
        "logs/datasets/{dataset}/encode-{codec}.log",
    benchmark:
        "benchmarks/datasets/{dataset}/encode-{codec}.tsv"
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
        codec=files.codec_option,
        published=files.codec_stamps,
        journal=f"{results}/datasets/{{dataset}}/journal",
    shell:
        "exec logged {params.devices:q} {log:q} python -m image_diffusion.encode --config {input.config:q} --data {input.data:q}"
        " {params.codec:q} --output {output.manifest:q} --journal {params.journal:q}"
