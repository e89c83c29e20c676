# a trained model, and the images it made where it makes any -> numbers with intervals


rule evaluate:
    input:
        config=config_of("evaluate"),
        before=configs_before("evaluate"),
        weights=f"{results}/{{experiment}}/train/weights.safetensors",
        model=f"{results}/{{experiment}}/train/model.json",
        samples=samples,
        data=real_data,
        detector=detector,
        reference=reference,
    output:
        metrics=report(
            f"{results}/{{experiment}}/metrics.json",
            category="Metrics",
            labels={"experiment": "{experiment}"},
            caption="../report/metrics.rst",
        ),
        pictures=report(
            directory(f"{results}/{{experiment}}/evaluation"),
            patterns=["{picture}.png"],
            category="Evaluation",
            labels={"experiment": "{experiment}", "picture": "{picture}"},
            caption="../report/evaluation.rst",
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
        reference=reference_option,
        data=lambda wildcards, input: Path(input.data).parent,
        previews=f"{results}/{{experiment}}/train/previews",
        samples=samples_option,
        journal=f"{results}/{{experiment}}/journal",
    shell:
        "logged {log:q} python -m image_diffusion.evaluate --config {input.config:q} --weights {input.weights:q}"
        " {params.samples:q} --data {params.data:q} {params.detector:q} {params.reference:q} --previews {params.previews:q}"
        " --report {output.pictures:q} --output {output.metrics:q} --journal {params.journal:q}"
