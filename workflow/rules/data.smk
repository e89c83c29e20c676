# images -> crops -> latents. Shards lie beside their manifest, undeclared: those that are up to date are kept.


rule crop:
    "Images of a data set: cut to squares of one size as ADM does, in webdataset shards; what cannot be read is listed."
    input:
        config=files.config("crop"),
        source=f"{results}/datasets/{{dataset}}/source.json",
        parts=parts.cropped_parts,
    output:
        manifest=f"{results}/datasets/{{dataset}}/crops/manifest.json",
    log:
        "logs/datasets/{dataset}/crop.log",
    benchmark:
        "benchmarks/datasets/{dataset}/crop.tsv"
    group:
        machine.shared_job
    conda:
        "../../envs/image-diffusion.yaml"
    threads: 4
    resources:
        **parts.crop_resources(),
    params:
        written=lambda wildcards, output: output[0],
        whole=parts.crop_whole_option,
        part=parts.part_option,
    shell:
        "exec logged {log:q} python -m image_diffusion crop --config {input.config:q} {params.whole:q} {params.part:q}"
        # Slurm knows what it gave; Snakemake caps its threads at the cores of the machine it was started on.
        " --output {params.written:q} --processes ${{SLURM_CPUS_PER_TASK:-{threads}}}"


use rule crop as crop_part with:
    "Square images of a part of a data set; `crop` then finds every shard in place."
    output:
        note=f"{results}/datasets/{{dataset}}/crops/part-{{part}}-of-{{parts}}.json",
    log:
        "logs/datasets/{dataset}/crop/part-{part}-of-{parts}.log",
    benchmark:
        "benchmarks/datasets/{dataset}/crop/part-{part}-of-{parts}.tsv"


rule datasheet:
    "What somebody should look at in a data set before training: a page, and the same as JSON."
    input:
        config=files.config("crop"),
        data=f"{results}/datasets/{{dataset}}/crops/manifest.json",
    output:
        sheet=f"{results}/datasets/{{dataset}}/datasheet/datasheet.json",
        page=shown(
            f"{results}/datasets/{{dataset}}/datasheet/index.html", "datasheet", "Data", **{"data set": "{dataset}"}
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
        **parts.crop_resources(mem_mb=8000),
    params:
        code=code["datasheet"],
        journal=f"{results}/datasets/{{dataset}}/journal",
    shell:
        "exec logged {log:q} python -m image_diffusion datasheet --config {input.config:q} --data {input.data:q}"
        " --output {output.sheet:q} --journal {params.journal:q} --processes ${{SLURM_CPUS_PER_TASK:-{threads}}}"


rule encode:
    "Latents of the crops, as the codec of the experiment makes them, in shards."
    input:
        **files.inputs("codec"),
        config=files.config("encode"),
        before=files.configs_before("encode"),
        data=files.to_encode,
        parts=parts.encoded_parts,
    output:
        manifest=f"{results}/datasets/{{dataset}}/{{codec}}/manifest.json",
    log:
        "logs/datasets/{dataset}/encode-{codec}.log",
    benchmark:
        "benchmarks/datasets/{dataset}/encode-{codec}.tsv"
    group:
        machine.shared_job
    conda:
        "../../envs/image-diffusion.yaml"
    threads: machine.threads
    resources:
        **machine.joining(),
    params:
        **files.options("codec"),
        written=lambda wildcards, output: output[0],
        devices=machine.devices_option,
        published=files.stamps("codec_files"),
        part=parts.part_option,
        journal=parts.journal_option,
    shell:
        "exec logged {params.devices:q} {log:q} python -m image_diffusion encode --config {input.config:q}"
        " --data {input.data:q} {params.codec:q} {params.part:q} --output {params.written:q} {params.journal:q}"


use rule encode as encode_part with:
    "Latents of a part of the crops; `encode` then finds every shard in place."
    output:
        mark=temp(f"{results}/datasets/{{dataset}}/{{codec}}/part-{{part}}-of-{{parts}}.done"),
    log:
        "logs/datasets/{dataset}/encode-{codec}/part-{part}-of-{parts}.log",
    benchmark:
        "benchmarks/datasets/{dataset}/encode-{codec}/part-{part}-of-{parts}.tsv"
