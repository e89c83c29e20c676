rule doctor:
    "What a training will take of time, memory and disk, from a few of its steps: results/EXPERIMENT/doctor.json."
    input:
        **files.inputs("codec", "pairs"),
        config=files.config("train"),
        data=files.training_data,
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
        **machine.one_process(),
    params:
        **files.options("codec", "pairs", "sample"),
        devices=machine.devices_option,
        nodes=machine.nodes,
        processes=machine.processes,
        memory_mb=machine.training_memory_mb,
        grace_s=machine.grace_s,
        sample_jobs=machine.sampling_jobs,
    shell:
        "exec env IMAGE_DIFFUSION_BRIEF= OMP_NUM_THREADS={resources.cpus_per_task} logged {params.devices:q} {log:q}"
        " python -m image_diffusion doctor --config {input.config:q} --data {input.data:q} {params.codec:q}"
        " {params.pairs:q} {params.sample:q} --sample-jobs {params.sample_jobs} --nodes {params.nodes}"
        " --processes-per-node {params.processes} --memory-mb {params.memory_mb} --grace-s {params.grace_s} --output"
        " {output.forecast:q}"
