# crops and captions, tables or folders, or the embeddings of others -> a set of the section pairs


rule embed:
    "Pairs of embeddings, which a prior learns from, or what is read beside the images: one set of the section pairs."
    input:
        detector=files.pair_detector,
        config=files.pair_config,
        before=files.configs_before("embed"),
        data=files.pair_sources,
    output:
        manifest=f"{results}/datasets/{{dataset}}/{{pairs}}/manifest.json",
    log:
        "logs/datasets/{dataset}/embed-{pairs}.log",
    benchmark:
        "benchmarks/datasets/{dataset}/embed-{pairs}.tsv"
    group:
        machine.shared_job
    conda:
        "../../envs/image-diffusion.yaml"
    threads: machine.threads
    resources:
        **machine.one_process(),
    params:
        devices=machine.devices_option,
        options=files.pair_options,
        read=files.pair_files,
        journal=f"{results}/datasets/{{dataset}}/journal",
    shell:
        "exec logged {params.devices:q} {log:q} python -m image_diffusion embed --config {input.config:q}"
        " {params.options:q} --output {output.manifest:q} --journal {params.journal:q}"
