# images -> numbers with intervals


rule evaluate:
    input:
        config=config_of("evaluate"),
        before=configs_before("evaluate"),
        samples=f"{results}/{{experiment}}/samples/samples.npz",
        protocol=f"{results}/{{experiment}}/samples/samples.json",
        data=crops,
        detector=detector,
    output:
        metrics=report(
            f"{results}/{{experiment}}/metrics.json",
            category="Metrics",
            labels={"experiment": "{experiment}"},
            caption="../report/metrics.rst",
        ),
    log:
        "logs/{experiment}/evaluate.log",
    benchmark:
        "benchmarks/{experiment}/evaluate.tsv"
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
        code=code["evaluate"],
        detector=detector_option,
        data=lambda wildcards, input: Path(input.data).parent,
        previews=f"{results}/{{experiment}}/train/previews",
        pictures=f"{results}/{{experiment}}/evaluation",
        journal=f"{results}/{{experiment}}/journal",
    shell:
        "logged {log:q} python -m image_diffusion.evaluate --config {input.config:q} --samples {input.samples:q}"
        " --data {params.data:q} {params.detector:q} --previews {params.previews:q} --report {params.pictures:q}"
        " --output {output.metrics:q}"
        " --journal {params.journal:q}"
