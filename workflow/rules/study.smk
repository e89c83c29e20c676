# a study: variants of an experiment, compared with intervals: snakemake --cores all --config study=NAME
# Where a run fails, what there is becomes the same page, without study.md (follow.smk): no variant takes others away.


rule study:
    "Variants of an experiment, compared with intervals: a page, a CSV and a Markdown table."
    input:
        plan=f"{results}/studies/{{study}}/plan.json",
        results=files.study_runs,
    output:
        page=shown(f"{results}/studies/{{study}}/index.html", "study", "Studies", study="{study}"),
        csv=f"{results}/studies/{{study}}/study.csv",
        markdown=f"{results}/studies/{{study}}/study.md",
    log:
        "logs/studies/{study}/study.log",
    localrule: True
    conda:
        "../../envs/image-diffusion.yaml"
    params:
        pages=context.pages,
        study=subpath(output.page, parent=True),
        results=subpath(output.page, ancestor=3),
    shell:
        "exec logged {log:q} study.py --study {params.study:q} --results {params.results:q} --benchmarks benchmarks"


rule track_study:
    "The runs of a study in MLflow, with tags that find them, and the page as a run of its own."
    input:
        page=f"{results}/studies/{{study}}/index.html",
        csv=f"{results}/studies/{{study}}/study.csv",
        markdown=f"{results}/studies/{{study}}/study.md",
    output:
        summary=f"{results}/studies/{{study}}/tracked.json",
    log:
        "logs/studies/{study}/track.log",
    localrule: True
    conda:
        "../../envs/image-diffusion.yaml"
    params:
        **tracked_to,
        code=code["track"],
        study=subpath(output.summary, parent=True),
        results=subpath(output.summary, ancestor=3),
    shell:
        "export MLFLOW_TRACKING_URI=${params.store};"
        " exec logged {log:q} python -m image_diffusion track --project {params.project:q} --study {params.study:q}"
        " --results {params.results:q} --output {output.summary:q}"
