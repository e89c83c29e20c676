# weights -> images


# Many images are made by several jobs, a part each; `sample` then joins them, and the parts go.
rule sample_part:
    input:
        config=config_of("sample"),
        before=configs_before("sample"),
        weights=f"{results}/{{experiment}}/train/weights.safetensors",
        model=f"{results}/{{experiment}}/train/model.json",
        codec=codec_weights,
        small_images=small_images,
    output:
        images=temp(f"{results}/{{experiment}}/samples/part-{{part}}-of-{{parts}}.npz"),
    log:
        "logs/{experiment}/sample/part-{part}-of-{parts}.log",
    benchmark:
        "benchmarks/{experiment}/sample/part-{part}-of-{parts}.tsv"
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
        code=code["sample"],
        codec=codec_option,
        small_images=small_images_option,
    shell:
        "logged {log:q} python -m image_diffusion.sample --config {input.config:q} --weights {input.weights:q}"
        " {params.codec:q} {params.small_images:q} --part {wildcards.part}/{wildcards.parts} --output {output.images:q}"


rule sample:
    input:
        config=config_of("sample"),
        before=configs_before("sample"),
        weights=f"{results}/{{experiment}}/train/weights.safetensors",
        model=f"{results}/{{experiment}}/train/model.json",
        codec=codec_weights,
        small_images=small_images,
        parts=sampled_parts,
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
        code=code["sample"],
        codec=codec_option,
        small_images=small_images_option,
        parts=sampled_option,
        journal=f"{results}/{{experiment}}/journal",
    shell:
        "logged {log:q} python -m image_diffusion.sample --config {input.config:q} --weights {input.weights:q}"
        " {params.codec:q} {params.small_images:q} {params.parts:q} --output {output.samples:q}"
        " --journal {params.journal:q}"
