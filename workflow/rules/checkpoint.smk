# a checkpoint of a training, which may go on meanwhile -> images:
#   snakemake --cores 1 results/EXPERIMENT/checkpoints/latest/grid.png
# Only checkpoints are read and no file of another rule is written. A codec and small images are no inputs, since the
# training would not run without the one, and Snakemake would lock whatever makes them: so neither the training nor the
# Snakemake that runs it notices.


rule checkpoint_weights:
    "Weights of a checkpoint of a training, which may go on meanwhile."
    input:
        config=files.config("train"),
    output:
        weights=f"{results}/{{experiment}}/checkpoints/{{step}}/weights.safetensors",
        model=f"{results}/{{experiment}}/checkpoints/{{step}}/model.json",
    log:
        "logs/{experiment}/checkpoints/weights-{step}.log",
    conda:
        "../../envs/image-diffusion.yaml"
    resources:
        cpus_per_task=1,
        mem_mb=machine.memory_mb,
        runtime=30,
    params:
        code=code["ema"],
        state=f"{results}/{{experiment}}/train/state",
        which=files.checkpoint_option,
        newest=files.newest_checkpoint,
    shell:
        "exec logged {log:q} python -m image_diffusion.ema --state {params.state:q} --trained-by {input.config:q}"
        " {params.which:q} --output {output.weights:q}"


rule checkpoint_sample:
    "Images of that checkpoint: results/EXPERIMENT/checkpoints/latest/grid.png."
    input:
        config=files.config("sample"),
        before=files.configs_before("sample"),
        weights=f"{results}/{{experiment}}/checkpoints/{{step}}/weights.safetensors",
        model=f"{results}/{{experiment}}/checkpoints/{{step}}/model.json",
    output:
        samples=f"{results}/{{experiment}}/checkpoints/{{step}}/samples.npz",
        protocol=f"{results}/{{experiment}}/checkpoints/{{step}}/samples.json",
        grid=f"{results}/{{experiment}}/checkpoints/{{step}}/grid.png",
        steps=f"{results}/{{experiment}}/checkpoints/{{step}}/steps.png",
    log:
        "logs/{experiment}/checkpoints/sample-{step}.log",
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
        codec=files.codec_option,
        small_images=files.small_images_option,
        embeddings=files.embeddings_option,
    shell:
        "exec logged {params.devices:q} {log:q} python -m image_diffusion.sample --config {input.config:q} --weights {input.weights:q}"
        " {params.codec:q} {params.small_images:q} {params.embeddings:q} --shown --output {output.samples:q}"
