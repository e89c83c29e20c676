# weights -> images, or embeddings

sampled_with = files.inputs("codec", "small_images", "embeddings", "prompts", "pictures", "crop")


rule sample:
    "Images of a trained model, each with its own seed."
    input:
        **files.of_model("sample", before="sample"),
        **sampled_with,
        parts=parts.sampled_parts,
    output:
        samples=f"{results}/{{experiment}}/samples/samples.npz",
        protocol=f"{results}/{{experiment}}/samples/samples.json",
        grid=shown(f"{results}/{{experiment}}/samples/grid.png", "grid", "Samples", picture="samples"),
        steps=shown(f"{results}/{{experiment}}/samples/steps.png", "steps", "Samples", picture="from noise to image"),
    log:
        "logs/{experiment}/sample.log",
    benchmark:
        "benchmarks/{experiment}/sample.tsv"
    group:
        machine.shared_job
    conda:
        "../../envs/image-diffusion.yaml"
    threads: machine.threads
    resources:
        **machine.one_process(runtime=machine.sampling_min),
    params:
        **parts.options(),
        **files.options("trained_by", "codec", "small_images", "embeddings", "crop"),
        devices=machine.devices_option,
        code=code["sample"],
        other_weights=files.stamps("decoder_files", "weaker_files"),
        read=files.sample_stamps,
    shell:
        "exec logged {params.devices:q} {log:q} python -m image_diffusion sample --config {input.config:q}"
        " --weights {input.weights:q} {params.trained_by:q} {params.codec:q} {params.small_images:q}"
        " {params.embeddings:q} {params.crop:q} {params.parts:q} {params.part:q} --output {params.written:q}"
        " {params.journal:q}"


use rule sample as sample_part with:
    "A part of an experiment's samples; `sample` then joins the parts, and they go."
    output:
        samples=temp(f"{results}/{{experiment}}/samples/part-{{part}}-of-{{parts}}.npz"),
    log:
        "logs/{experiment}/sample/part-{part}-of-{parts}.log",
    benchmark:
        "benchmarks/{experiment}/sample/part-{part}-of-{parts}.tsv"


use rule sample as sample_embeddings with:
    "Image embeddings that a prior makes of its prompts, as clip-retrieval writes them for other programs too."
    output:
        described=f"{results}/{{experiment}}/samples/embeddings.json",
        embeddings=directory(f"{results}/{{experiment}}/samples/img_emb"),
        metadata=directory(f"{results}/{{experiment}}/samples/metadata"),
    log:
        "logs/{experiment}/sample_embeddings.log",
    benchmark:
        "benchmarks/{experiment}/sample_embeddings.tsv"
    resources:
        **machine.one_process(),
