# journals and results -> MLflow. Stages never wait for it.

from image_diffusion.core.process.secrets import variable_of

# A URI can hold a password, which everybody could read here: the environment has it.
tracked_to = {"store": variable_of(config["tracking"]["uri"]), "project": config["tracking"]["project"]}


rule track:
    "The history of an experiment in MLflow; sent again, it adds nothing."
    input:
        **files.inputs("datasheet"),
        before=files.outputs,
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
        **tracked_to,
        code=code["track"],
        experiment=subpath(output.summary, parent=True),
    shell:
        "export MLFLOW_TRACKING_URI=${params.store}; exec logged {log:q} python -m image_diffusion track"
        " --project {params.project:q} --experiment {params.experiment:q} --output {output.summary:q}"
