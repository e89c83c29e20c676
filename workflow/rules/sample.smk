# weights -> images


rule sample:
    input:
        config=config_of("sample"),
        before=configs_before("sample"),
        weights=f"{results}/{{experiment}}/train/weights.safetensors",
        model=f"{results}/{{experiment}}/train/model.json",
        codec=codec_weights,
        small_images=small_images,
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
        journal=f"{results}/{{experiment}}/journal",
    shell:
        "logged {log:q} python -m image_diffusion.sample --config {input.config:q} --weights {input.weights:q}"
        " {params.codec:q} {params.small_images:q} --output {output.samples:q}"
        " --journal {params.journal:q}"
