# weights -> images, or embeddings


# Many samples are made by several jobs, a part each; `sample` then joins them, and the parts go.
rule sample_part:
    "A part of an experiment's samples: many are made by several jobs."
    input:
        config=files.config("sample"),
        before=files.configs_before("sample"),
        weights=f"{results}/{{experiment}}/train/weights.safetensors",
        model=f"{results}/{{experiment}}/train/model.json",
        codec=files.codec_weights,
        small_images=files.small_images,
        embeddings=files.embeddings,
        prompts=files.prompts,
    output:
        samples=temp(f"{results}/{{experiment}}/samples/part-{{part}}-of-{{parts}}.npz"),
    log:
        "logs/{experiment}/sample/part-{part}-of-{parts}.log",
    benchmark:
        "benchmarks/{experiment}/sample/part-{part}-of-{parts}.tsv"
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
        runtime=machine.sampling_min,
    params:
        devices=machine.devices_option,
        code=code["sample"],
        trained_by=files.trained_by_option,
        codec=files.codec_option,
        decoder=files.decoder_stamps,
        small_images=files.small_images_option,
        embeddings=files.embeddings_option,
    shell:
        "exec logged {params.devices:q} {log:q} python -m image_diffusion.sample --config {input.config:q} --weights {input.weights:q}"
        " {params.trained_by:q}"
        " {params.codec:q} {params.small_images:q} {params.embeddings:q} --part {wildcards.part}/{wildcards.parts}"
        " --output {output.samples:q}"


rule sample:
    "Images of a trained model, each with its own seed."
    input:
        config=files.config("sample"),
        before=files.configs_before("sample"),
        weights=f"{results}/{{experiment}}/train/weights.safetensors",
        model=f"{results}/{{experiment}}/train/model.json",
        codec=files.codec_weights,
        small_images=files.small_images,
        embeddings=files.embeddings,
        prompts=files.prompts,
        parts=files.sampled_parts,
    output:
        samples=f"{results}/{{experiment}}/samples/samples.npz",
        protocol=f"{results}/{{experiment}}/samples/samples.json",
        grid=report(
            f"{results}/{{experiment}}/samples/grid.png",
            category="Samples",
            labels={"experiment": "{experiment}", "picture": "samples"},
            caption="../report/grid.rst",
        ),
        steps=report(
            f"{results}/{{experiment}}/samples/steps.png",
            category="Samples",
            labels={"experiment": "{experiment}", "picture": "from noise to image"},
            caption="../report/steps.rst",
        ),
    log:
        "logs/{experiment}/sample.log",
    benchmark:
        "benchmarks/{experiment}/sample.tsv"
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
        runtime=machine.sampling_min,
    params:
        devices=machine.devices_option,
        code=code["sample"],
        trained_by=files.trained_by_option,
        codec=files.codec_option,
        decoder=files.decoder_stamps,
        small_images=files.small_images_option,
        embeddings=files.embeddings_option,
        parts=files.made_option,
        journal=f"{results}/{{experiment}}/journal",
    shell:
        "exec logged {params.devices:q} {log:q} python -m image_diffusion.sample --config {input.config:q} --weights {input.weights:q}"
        " {params.trained_by:q}"
        " {params.codec:q} {params.small_images:q} {params.embeddings:q} {params.parts:q} --output {output.samples:q}"
        " --journal {params.journal:q}"


# A prior makes no images. Its samples lie as clip-retrieval writes them, so that other programs read them as well.
rule sample_embeddings:
    "Image embeddings that a trained prior makes of its prompts, each with its own seed."
    input:
        config=files.config("sample"),
        before=files.configs_before("sample"),
        weights=f"{results}/{{experiment}}/train/weights.safetensors",
        model=f"{results}/{{experiment}}/train/model.json",
        prompts=files.prompts,
        parts=files.sampled_parts,
    output:
        described=f"{results}/{{experiment}}/samples/embeddings.json",
        embeddings=directory(f"{results}/{{experiment}}/samples/img_emb"),
        metadata=directory(f"{results}/{{experiment}}/samples/metadata"),
    log:
        "logs/{experiment}/sample_embeddings.log",
    benchmark:
        "benchmarks/{experiment}/sample_embeddings.tsv"
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
        code=code["sample"],
        trained_by=files.trained_by_option,
        parts=files.made_option,
        journal=f"{results}/{{experiment}}/journal",
    shell:
        "exec logged {params.devices:q} {log:q} python -m image_diffusion.sample --config {input.config:q} --weights {input.weights:q}"
        " {params.trained_by:q} {params.parts:q} --output {output.described:q} --journal {params.journal:q}"
