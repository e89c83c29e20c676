# curves: one point for each value of what is varied, sampled and judged like the experiment's own samples


rule sweep_weights:
    "Other weights of the training: of an earlier step, or of another average, from the checkpoint that was kept."
    input:
        weights=f"{results}/{{experiment}}/train/weights.safetensors",
        model=f"{results}/{{experiment}}/train/model.json",
    output:
        weights=f"{results}/{{experiment}}/sweep/{{axis}}/{{value}}/weights/weights.safetensors",
        model=f"{results}/{{experiment}}/sweep/{{axis}}/{{value}}/weights/model.json",
    log:
        "logs/{experiment}/sweep/weights-{axis}-{value}.log",
    group:
        machine.shared_job
    conda:
        "../../envs/image-diffusion.yaml"
    resources:
        cpus_per_task=1,
        mem_mb=machine.memory_mb,
        runtime=30,
    params:
        code=code["ema"],
        state=f"{results}/{{experiment}}/train/state",
        which=files.swept_weights_option,
    shell:
        "exec logged {log:q} python -m image_diffusion.ema --state {params.state:q} {params.which:q}"
        " --weights {input.weights:q} --output {output.weights:q}"


rule sweep_sample:
    "Images of one point of a curve."
    input:
        config=files.swept_config,
        before=files.configs_before("sample"),
        weights=files.swept_weights,
        codec=files.codec_weights,
        small_images=files.small_images,
        embeddings=files.embeddings,
        prompts=files.prompts,
    output:
        samples=f"{results}/{{experiment}}/sweep/{{axis}}/{{value}}/samples.npz",
        protocol=f"{results}/{{experiment}}/sweep/{{axis}}/{{value}}/samples.json",
    log:
        "logs/{experiment}/sweep/sample-{axis}-{value}.log",
    benchmark:
        "benchmarks/{experiment}/sweep/sample-{axis}-{value}.tsv"
    retries: machine.attempts(2)
    group:
        machine.shared_job
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
        trained_by=files.trained_by_option,
        codec=files.codec_option,
        small_images=files.small_images_option,
        embeddings=files.embeddings_option,
    shell:
        "exec logged {params.devices:q} {log:q} python -m image_diffusion.sample --config {input.config:q} --weights {input.weights:q}"
        " {params.trained_by:q}"
        " {params.codec:q} {params.small_images:q} {params.embeddings:q} --output {output.samples:q}"


rule sweep_evaluate:
    "How good one point of a curve is."
    input:
        config=f"{results}/{{experiment}}/config/sweep/evaluate.yaml",
        before=files.configs_before("sample"),
        weights=files.swept_weights,
        samples=f"{results}/{{experiment}}/sweep/{{axis}}/{{value}}/samples.npz",
        protocol=f"{results}/{{experiment}}/sweep/{{axis}}/{{value}}/samples.json",
        made_with=files.made_with,
        data=files.real_data,
        detector=files.detector,
        references=files.references,
        reference=files.reference,
    output:
        metrics=f"{results}/{{experiment}}/sweep/{{axis}}/{{value}}/metrics.json",
    log:
        "logs/{experiment}/sweep/evaluate-{axis}-{value}.log",
    benchmark:
        "benchmarks/{experiment}/sweep/evaluate-{axis}-{value}.tsv"
    retries: machine.attempts(2)
    group:
        machine.shared_job
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
        code=code["evaluate"],
        trained_by=files.trained_by_option,
        making=files.making_option,
        detector=files.detector_option,
        references=files.references_option,
        reference=files.reference_option,
        data=subpath(input.data, parent=True),
    shell:
        "exec logged {params.devices:q} {log:q} python -m image_diffusion.evaluate --config {input.config:q} --weights {input.weights:q}"
        " {params.trained_by:q}"
        " --samples {input.samples:q} {params.making:q} --data {params.data:q} {params.detector:q}"
        " {params.references:q} {params.reference:q} --output {output.metrics:q}"


rule sweep:
    "A curve: the metrics against one setting, the best value marked."
    input:
        points=files.swept_points,
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
        points=files.swept_point_options,
        headline=files.headline,
        journal=f"{results}/{{experiment}}/journal",
    shell:
        "exec logged {log:q} python -m image_diffusion.sweep --axis {wildcards.axis} --points {params.points:q}"
        " --headline {params.headline:q} --output {output.curve:q} --plot {output.plot:q} --journal {params.journal:q}"
