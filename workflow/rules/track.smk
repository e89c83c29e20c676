# journals and results -> MLflow. Stages never wait for it.


rule track:
    input:
        before=results_of,
    output:
        summary=f"{results}/{{experiment}}/tracked.json",
    log:
        "logs/{experiment}/track.log",
    benchmark:
        "benchmarks/{experiment}/track.tsv"
    localrule: True
    conda:
        "../../envs/image-diffusion.yaml"
    params:
        store=config["tracking"]["uri"],
        project=config["tracking"]["project"],
        experiment=lambda wildcards, output: Path(output.summary).parent,
        dataset=lambda wildcards: f"{results}/datasets/{plan_of(wildcards)['dataset']}",
        codec=codec_option,
        headline=lambda wildcards: plan_of(wildcards)["headline"],
    shell:
        "logged {log:q} python -m image_diffusion.track --store {params.store:q} --project {params.project:q}"
        " --experiment {params.experiment:q} --dataset {params.dataset:q} {params.codec:q}"
        " --best-metric {params.headline:q} --output {output.summary:q}"
