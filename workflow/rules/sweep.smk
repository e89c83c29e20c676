# curves: one point for each value of what is varied, sampled and judged like the experiment's own samples


# The weights of an earlier step of the training, from the checkpoint that was kept.
rule sweep_weights:
    input:
        weights=f"{results}/{{experiment}}/train/weights.safetensors",
        model=f"{results}/{{experiment}}/train/model.json",
    output:
        weights=f"{results}/{{experiment}}/sweep/checkpoint/{{value}}/weights/weights.safetensors",
        model=f"{results}/{{experiment}}/sweep/checkpoint/{{value}}/weights/model.json",
    log:
        "logs/{experiment}/sweep/weights-{value}.log",
    conda:
        "../../envs/image-diffusion.yaml"
    resources:
        nodes=1,
        cpus_per_task=1,
        mem_mb=asked("memory_mb"),
        runtime=30,
    params:
        state=f"{results}/{{experiment}}/train/state",
    shell:
        "logged {log:q} python -m image_diffusion.ema --state {params.state:q} --step {wildcards.value}"
        " --weights {input.weights:q} --output {output.weights:q}"


rule sweep_sample:
    input:
        config=swept_config,
        before=configs_before("sample"),
        weights=swept_weights,
        codec=codec_weights,
        small_images=small_images,
    output:
        samples=f"{results}/{{experiment}}/sweep/{{axis}}/{{value}}/samples.npz",
        protocol=f"{results}/{{experiment}}/sweep/{{axis}}/{{value}}/samples.json",
    log:
        "logs/{experiment}/sweep/sample-{axis}-{value}.log",
    benchmark:
        "benchmarks/{experiment}/sweep/sample-{axis}-{value}.tsv"
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
        code=code["sample"],
        codec=codec_option,
        small_images=small_images_option,
    shell:
        "logged {log:q} python -m image_diffusion.sample --config {input.config:q} --weights {input.weights:q}"
        " {params.codec:q} {params.small_images:q} --output {output.samples:q}"


rule sweep_evaluate:
    input:
        config=f"{results}/{{experiment}}/config/sweep/evaluate.yaml",
        before=configs_before("sample"),
        weights=swept_weights,
        samples=f"{results}/{{experiment}}/sweep/{{axis}}/{{value}}/samples.npz",
        protocol=f"{results}/{{experiment}}/sweep/{{axis}}/{{value}}/samples.json",
        data=real_data,
        detector=detector,
        reference=reference,
    output:
        metrics=f"{results}/{{experiment}}/sweep/{{axis}}/{{value}}/metrics.json",
    log:
        "logs/{experiment}/sweep/evaluate-{axis}-{value}.log",
    benchmark:
        "benchmarks/{experiment}/sweep/evaluate-{axis}-{value}.tsv"
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
    shell:
        "logged {log:q} python -m image_diffusion.evaluate --config {input.config:q} --weights {input.weights:q}"
        " --samples {input.samples:q} --data {params.data:q} {params.detector:q}"
        " {params.reference:q} --output {output.metrics:q}"


rule sweep:
    input:
        points=swept_points,
    output:
        curve=f"{results}/{{experiment}}/sweep/{{axis}}/curve.json",
        plot=report(
            f"{results}/{{experiment}}/sweep/{{axis}}/curve.png",
            category="Curves",
            labels={"experiment": "{experiment}", "picture": "{axis}"},
            caption="../report/sweep.rst",
        ),
    log:
        "logs/{experiment}/sweep/{axis}.log",
    localrule: True
    conda:
        "../../envs/image-diffusion.yaml"
    params:
        code=code["sweep"],
        points=swept_point_options,
        headline=lambda wildcards: plan_of(wildcards)["headline"],
        journal=f"{results}/{{experiment}}/journal",
    shell:
        "logged {log:q} python -m image_diffusion.sweep --axis {wildcards.axis} --points {params.points:q}"
        " --headline {params.headline:q} --output {output.curve:q} --plot {output.plot:q} --journal {params.journal:q}"
