# What an experiment will take, from a few steps of its training: snakemake results/EXPERIMENT/doctor.json


rule doctor:
    input:
        config=config_of("train"),
        data=training_data,
        codec=codec_weights,
    output:
        forecast=f"{results}/{{experiment}}/doctor.json",
    log:
        "logs/{experiment}/doctor.log",
    benchmark:
        "benchmarks/{experiment}/doctor.tsv"
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
        nodes=asked("nodes"),
        processes=asked("processes_per_node"),
        codec=codec_option,
        sample=sample_config_option,
    shell:
        "env OMP_NUM_THREADS={resources.cpus_per_task} logged {log:q} python -m image_diffusion.doctor"
        " --config {input.config:q} --data {input.data:q} {params.codec:q} {params.sample:q} --nodes {params.nodes}"
        " --processes-per-node {params.processes} --memory-mb {resources.mem_mb} --output {output.forecast:q}"
