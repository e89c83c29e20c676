# weights -> a folder that diffusers loads


rule export:
    "A folder that diffusers loads, with a model card."
    input:
        **files.of_model("export", before="export"),
        **files.inputs("codec", "grid"),
        metrics=f"{results}/{{experiment}}/metrics.json",
    output:
        folder=directory(f"{results}/{{experiment}}/diffusers"),
    log:
        "logs/{experiment}/export.log",
    benchmark:
        "benchmarks/{experiment}/export.tsv"
    group:
        machine.shared_job
    conda:
        "../../envs/image-diffusion.yaml"
    resources:
        **machine.one_core(),
    params:
        **files.options("trained_by", "codec", "grid"),
        code=code["export"],
        data=lambda wildcards: plans.plan_for(wildcards).dataset,
    shell:
        "exec logged {log:q} python -m image_diffusion export --config {input.config:q} --weights {input.weights:q}"
        " {params.trained_by:q} {params.codec:q} --metrics {input.metrics:q} {params.grid:q}"
        " --data-name {params.data:q} --output {output.folder:q}"
