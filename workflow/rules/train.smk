# data -> weights. Checkpoints lie in train/state, undeclared: nothing deletes them, and each attempt continues.


rule train:
    "Weights. After any end the next attempt goes on from the last checkpoint."
    input:
        **files.inputs("codec", "start", "pairs"),
        config=files.config("train"),
        before=files.configs_before("train"),
        data=files.training_data,
    output:
        weights=f"{results}/{{experiment}}/train/weights.safetensors",
        model=f"{results}/{{experiment}}/train/model.json",
    log:
        "logs/{experiment}/train.log",
    benchmark:
        "benchmarks/{experiment}/train.tsv"
    group:
        machine.shared_job
    conda:
        "../../envs/image-diffusion.yaml"
    threads: machine.training_threads
    resources:
        **machine.gpu_resources(machine.gpus),
        nodes=machine.nodes,
        tasks=machine.tasks,
        mpi=machine.mpi,
        devices=machine.training_devices,
        tasks_per_gpu=0,
        cpus_per_task=machine.training_cpus,
        mem_mb=machine.training_memory_mb,
        runtime=machine.runtime_min,
        # Here and not in params: weights do not depend on where they were trained.
        processes=machine.processes,
        threads_per_process=machine.cpus,
        grace_s=machine.grace_s,
        hang_s=machine.hang_s,
        stage_to=machine.stage_to,
        # Two minutes before the time is up training is told: it saves and ends, and the next attempt goes on.
        slurm_extra="--signal=TERM@120",
    params:
        **files.options("codec", "start", "pairs"),
        start_files=files.start_stamps,
        devices=machine.devices_option,
        logs="logs/{experiment}/train",
        journal=f"{results}/{{experiment}}/journal",
    shell:
        "exec logged {params.devices:q} {log:q} python -m image_diffusion.training.parallel.launch"
        " --nodes {resources.nodes} --processes-per-node {resources.processes}"
        " --threads-per-process {resources.threads_per_process} --logs {params.logs:q} --grace-s {resources.grace_s}"
        " -- image_diffusion train --config {input.config:q} --data {input.data:q} {params.codec:q}"
        " {params.start:q} {params.pairs:q} --output {output.weights:q} --journal {params.journal:q}"
        " --hang-s {resources.hang_s} --stage-to={resources.stage_to:q}"
