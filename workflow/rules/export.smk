# weights -> a folder that diffusers loads


rule export:
    "A folder that diffusers loads, with a model card."
    input:
        config=files.config("export"),
        before=files.configs_before("export"),
        weights=f"{results}/{{experiment}}/train/weights.safetensors",
        model=f"{results}/{{experiment}}/train/model.json",
        codec=files.codec_weights,
        metrics=f"{results}/{{experiment}}/metrics.json",
        grid=files.grid,
    output:
        folder=directory(f"{results}/{{experiment}}/diffusers"),
    log:
        "logs/{experiment}/export.log",
    benchmark:
        "benchmarks/{experiment}/export.tsv"
    retries: machine.attempts(2)
    group:
        machine.shared_job
    conda:
        "../../envs/image-diffusion.yaml"
    resources:
        cpus_per_task=1,
        mem_mb=machine.memory_mb,
        runtime=30,
    params:
        code=code["export"],
        trained_by=files.trained_by_option,
        codec=files.codec_option,
        grid=files.grid_option,
        data=files.dataset,
    shell:
        "exec logged {log:q} python -m image_diffusion.export --config {input.config:q} --weights {input.weights:q}"
        " {params.trained_by:q}"
        " {params.codec:q} --metrics {input.metrics:q} {params.grid:q} --data-name {params.data:q}"
        " --output {output.folder:q}"
