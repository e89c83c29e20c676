# curves: one point for each value of what is varied, sampled and judged like the experiment's own samples


rule sweep_weights:
    "Other weights of the training: of an earlier step, or of another average, from the checkpoint that was kept."
    input:
        weights=f"{results}/{{experiment}}/train/weights.safetensors",
        model=f"{results}/{{experiment}}/train/model.json",
        curve=files.choosing_curve,
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
        **machine.one_core(),
    params:
        code=code["ema"],
        state=f"{results}/{{experiment}}/train/state",
        which=files.which_weights,
        training=lambda wildcards, input: ["--weights", input.weights],
    shell:
        "exec logged {log:q} python -m image_diffusion ema --state {params.state:q} {params.training:q}"
        " {params.which:q} --output {output.weights:q}"


use rule sample as sweep_sample with:
    "Images of one point of a curve."
    input:
        **sampled_with,
        config=files.swept_config,
        before=files.configs_before("sample"),
        weights=files.swept_weights,
    output:
        samples=f"{results}/{{experiment}}/sweep/{{axis}}/{{value}}/samples.npz",
        protocol=f"{results}/{{experiment}}/sweep/{{axis}}/{{value}}/samples.json",
    log:
        "logs/{experiment}/sweep/sample-{axis}-{value}.log",
    benchmark:
        "benchmarks/{experiment}/sweep/sample-{axis}-{value}.tsv"
    resources:
        **machine.one_process(),
    params:
        parts=[],
        journal=[],


use rule evaluate as sweep_evaluate with:
    "How good one point of a curve is."
    input:
        **judges,
        config=f"{results}/{{experiment}}/config/sweep/evaluate.yaml",
        before=files.configs_before("sample"),
        weights=files.swept_weights,
        samples=f"{results}/{{experiment}}/sweep/{{axis}}/{{value}}/samples.npz",
        protocol=f"{results}/{{experiment}}/sweep/{{axis}}/{{value}}/samples.json",
        made_with=files.made_with,
        data=files.real_data,
    output:
        metrics=f"{results}/{{experiment}}/sweep/{{axis}}/{{value}}/metrics.json",
    log:
        "logs/{experiment}/sweep/evaluate-{axis}-{value}.log",
    benchmark:
        "benchmarks/{experiment}/sweep/evaluate-{axis}-{value}.tsv"
    params:
        samples=lambda wildcards, input: ["--samples", input.samples],
        encoded=[],
        page=[],


rule sweep:
    "A curve: the metrics against one setting, the best value marked."
    input:
        points=lambda wildcards: list(files.swept_points(wildcards).values()),
    output:
        curve=f"{results}/{{experiment}}/sweep/{{axis}}/curve.json",
        plot=shown(f"{results}/{{experiment}}/sweep/{{axis}}/curve.png", "sweep", "Curves", picture="{axis}"),
    log:
        "logs/{experiment}/sweep/{axis}.log",
    localrule: True
    conda:
        "../../envs/image-diffusion.yaml"
    params:
        code=code["sweep"],
        points=lambda wildcards: [f"{value}={path}" for value, path in files.swept_points(wildcards).items()],
        headline=lambda wildcards: plans.plan_for(wildcards).headline,
        choose=files.choosing_option,
        journal=f"{results}/{{experiment}}/journal",
    shell:
        "exec logged {log:q} python -m image_diffusion sweep --axis {wildcards.axis} --points {params.points:q}"
        " --headline {params.headline:q} {params.choose:q} --output {output.curve:q} --plot {output.plot:q}"
        " --journal {params.journal:q}"
