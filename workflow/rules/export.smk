# weights -> a folder that diffusers loads


rule export:
    input:
        config=config_of("export"),
        before=configs_before("export"),
        weights=f"{results}/{{experiment}}/train/weights.safetensors",
        model=f"{results}/{{experiment}}/train/model.json",
        codec=codec_weights,
        metrics=f"{results}/{{experiment}}/metrics.json",
        grid=sample_grid,
    output:
        folder=directory(f"{results}/{{experiment}}/diffusers"),
    log:
        "logs/{experiment}/export.log",
    benchmark:
        "benchmarks/{experiment}/export.tsv"
    retries: attempts(2)
    conda:
        "../../envs/image-diffusion.yaml"
    resources:
        nodes=1,
        cpus_per_task=1,
        mem_mb=asked("memory_mb"),
        runtime=30,
    params:
        code=code["export"],
        codec=codec_option,
        grid=sample_grid_option,
        data=lambda wildcards: plan_of(wildcards)["dataset"],
    shell:
        "logged {log:q} python -m image_diffusion.export --config {input.config:q} --weights {input.weights:q}"
        " {params.codec:q} --metrics {input.metrics:q} {params.grid:q} --data-name {params.data:q}"
        " --output {output.folder:q}"
