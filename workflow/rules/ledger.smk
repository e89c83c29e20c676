# a ledger: what each of its changes is worth, from the runs of all rows: snakemake --cores all --config ledger=NAME
# Where a run fails, what there is becomes the same page (follow.smk), so that one row never takes the others away.


rule ledger:
    "What each change of a ledger is worth: a page, a CSV and a Markdown table."
    input:
        plan=files.ledger_plan,
        results=files.ledger_runs,
    output:
        page=report(
            f"{results}/ledgers/{{ledger}}/index.html",
            category="Ledgers",
            labels={"ledger": "{ledger}"},
            caption="../report/ledger.rst",
        ),
        csv=f"{results}/ledgers/{{ledger}}/ledger.csv",
        markdown=f"{results}/ledgers/{{ledger}}/ledger.md",
    log:
        "logs/ledgers/{ledger}/ledger.log",
    localrule: True
    conda:
        "../../envs/image-diffusion.yaml"
    params:
        pages=known.pages,
        ledger=subpath(output.page, parent=True),
        results=subpath(output.page, ancestor=3),
    shell:
        "exec logged {log:q} ledger.py --ledger {params.ledger:q} --results {params.results:q} --benchmarks benchmarks"


rule track_ledger:
    "The runs of a ledger in MLflow, with tags that find them, and the page as a run of its own."
    input:
        page=f"{results}/ledgers/{{ledger}}/index.html",
        csv=f"{results}/ledgers/{{ledger}}/ledger.csv",
        markdown=f"{results}/ledgers/{{ledger}}/ledger.md",
    output:
        summary=f"{results}/ledgers/{{ledger}}/tracked.json",
    log:
        "logs/ledgers/{ledger}/track.log",
    localrule: True
    conda:
        "../../envs/image-diffusion.yaml"
    params:
        store=variable_of(config["tracking"]["uri"]),
        project=config["tracking"]["project"],
        ledger=subpath(output.summary, parent=True),
        results=subpath(output.summary, ancestor=3),
    shell:
        "export MLFLOW_TRACKING_URI=${params.store};"
        " exec logged {log:q} python -m image_diffusion.track --project {params.project:q} --ledger {params.ledger:q}"
        " --results {params.results:q} --output {output.summary:q}"
