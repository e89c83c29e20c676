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
    retries: attempts(2)
    conda:
        "../../envs/image-diffusion.yaml"
    resources:
        nodes=1,
        cpus_per_task=1,
        mem_mb=2000,
        runtime=30,
    params:
        store=config["tracking"]["uri"],
        project=config["tracking"]["project"],
        experiment=lambda wildcards, output: Path(output.summary).parent,
        dataset=lambda wildcards: f"{results}/datasets/{plan_of(wildcards)['dataset']}",
    shell:
        "logged {log:q} python -m image_diffusion.track --store {params.store:q} --project {params.project:q}"
        " --experiment {params.experiment:q} --dataset {params.dataset:q} --output {output.summary:q}"
