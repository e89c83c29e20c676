# a checkpoint of a training, which may go on meanwhile -> images:
#   snakemake --cores 1 results/EXPERIMENT/checkpoints/latest/grid.png
# Only checkpoints are read and no file of another rule is written. A codec and small images are no inputs: Snakemake
# would lock whatever makes them, and training does not run without the codec. So the Snakemake that trains goes on.


use rule sweep_weights as checkpoint_weights with:
    "Weights of a checkpoint of a training, which may go on meanwhile."
    input:
        config=files.config("train"),
    output:
        weights=f"{results}/{{experiment}}/checkpoints/{{step}}/weights.safetensors",
        model=f"{results}/{{experiment}}/checkpoints/{{step}}/model.json",
    log:
        "logs/{experiment}/checkpoints/weights-{step}.log",
    params:
        which=lambda wildcards: [] if wildcards.step == "latest" else ["--step", wildcards.step],
        newest=files.newest_checkpoint,
        training=files.options("trained_by")["trained_by"],


use rule sample as checkpoint_sample with:
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
    benchmark:
        "benchmarks/{experiment}/checkpoints/sample-{step}.tsv"
    resources:
        **machine.one_process(),
    params:
        trained_by=[],
        parts=[],
        part=["--shown"],
        journal=[],
