# journals and results -> MLflow. Stages never wait for it.

from image_diffusion.core.secrets import variable_of


rule track:
    "The history of an experiment in MLflow; sent again, it adds nothing."
    input:
        before=files.made,
        datasheet=files.datasheet,
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
        # A URI can hold a password, which everybody could read here: the environment has it.
        store=variable_of(config["tracking"]["uri"]),
        project=config["tracking"]["project"],
        experiment=subpath(output.summary, parent=True),
        dataset=files.dataset_folder,
        codec=files.codec_option,
        headline=files.headline,
    shell:
        "export MLFLOW_TRACKING_URI=${params.store};"
        " exec logged {log:q} python -m image_diffusion.track --project {params.project:q} --experiment {params.experiment:q}"
        " --dataset {params.dataset:q} {params.codec:q} --best-metric {params.headline:q} --output {output.summary:q}"
