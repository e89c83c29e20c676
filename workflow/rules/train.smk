# data -> weights. Checkpoints lie in train/state, undeclared: nothing deletes them, every attempt goes on from the last.


rule train:
    input:
        config=config_of("train"),
        before=configs_before("train"),
        data=training_data,
        codec=codec_weights,
    output:
        weights=f"{results}/{{experiment}}/train/weights.safetensors",
        model=f"{results}/{{experiment}}/train/model.json",
    log:
        "logs/{experiment}/train.log",
    benchmark:
        "benchmarks/{experiment}/train.tsv"
    retries: attempts(20)
    conda:
        "../../envs/image-diffusion.yaml"
    threads: local_threads(training_cpus)
    resources:
        nodes=asked("nodes"),
        tasks=several_nodes(None),
        mpi=several_nodes("srun"),
        gres=gpus,
        tasks_per_gpu=0,
        cpus_per_task=training_cpus,
        mem_mb=asked("memory_mb"),
        runtime=asked("runtime_min"),
        # Two minutes before the time is up training is told: it saves and ends, and the next attempt goes on.
        slurm_extra="--signal=TERM@120",
    params:
        processes=asked("processes_per_node"),
        threads=asked("cpus_per_process"),
        logs="logs/{experiment}/train",
        codec=codec_option,
        journal=f"{results}/{{experiment}}/journal",
    shell:
        "logged {log:q} python -m image_diffusion.training.launch --nodes {resources.nodes}"
        " --processes-per-node {params.processes} --threads-per-process {params.threads} --logs {params.logs:q}"
        " -- image_diffusion.train --config {input.config:q} --data {input.data:q} {params.codec:q}"
        " --output {output.weights:q} --journal {params.journal:q}"
