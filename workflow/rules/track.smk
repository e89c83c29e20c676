# journals and results -> MLflow. Stages never wait for it.


rule track:
    input:
        before=files.made,
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
        experiment=subpath(output.summary, parent=True),
        dataset=files.dataset_folder,
        codec=files.codec_option,
        headline=files.headline,
    shell:
        "exec logged {log:q} python -m image_diffusion.track --store {params.store:q} --project {params.project:q}"
        " --experiment {params.experiment:q} --dataset {params.dataset:q} {params.codec:q}"
        " --best-metric {params.headline:q} --output {output.summary:q}"
