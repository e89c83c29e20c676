# What an experiment will take, from a few steps of its training: snakemake results/EXPERIMENT/doctor.json


rule doctor:
    "What a training will take of time, memory and disk, from a few of its steps: results/EXPERIMENT/doctor.json."
    input:
        config=files.config("train"),
        data=files.training_data,
        codec=files.codec_weights,
        pairs=files.pairs_beside,
    output:
        forecast=f"{results}/{{experiment}}/doctor.json",
    log:
        "logs/{experiment}/doctor.log",
    benchmark:
        "benchmarks/{experiment}/doctor.tsv"
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
        nodes=machine.nodes,
        processes=machine.processes,
        memory_mb=machine.training_memory_mb,
        grace_s=machine.grace_s,
        codec=files.codec_option,
        pairs=files.pairs_beside_option,
        sample=files.sample_config_option,
        sample_jobs=machine.sampling_jobs,
    shell:
        "exec env OMP_NUM_THREADS={resources.cpus_per_task} logged {params.devices:q} {log:q} python -m image_diffusion.doctor"
        " --config {input.config:q} --data {input.data:q} {params.codec:q} {params.pairs:q} {params.sample:q} --sample-jobs {params.sample_jobs} --nodes {params.nodes}"
        " --processes-per-node {params.processes} --memory-mb {params.memory_mb} --grace-s {params.grace_s} --output {output.forecast:q}"
