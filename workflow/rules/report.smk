# everything that was found -> one page


rule report:
    input:
        results=results_of,
    output:
        page=report(
            f"{results}/{{experiment}}/report/index.html",
            category="Experiments",
            labels={"experiment": "{experiment}"},
            caption="../report/experiment.rst",
        ),
    log:
        "logs/{experiment}/report.log",
    localrule: True
    conda:
        "../../envs/image-diffusion.yaml"
    params:
        script=sha256_file(root / "workflow" / "scripts" / "report.py"),
        experiment=lambda wildcards: f"{results}/{wildcards.experiment}",
        data=lambda wildcards: data_folder(plan_of(wildcards)),
    shell:
        "logged {log:q} report.py --experiment {params.experiment:q} --data {params.data:q} --benchmarks benchmarks"
        " --output {output.page:q}"


# A line for each experiment, on a page and in the terminal.
rule summary:
    input:
        results=[results_of_experiment(name) for name in plans],
    output:
        page=report(
            f"{results}/summary.html",
            category="Summary",
            labels={"page": "all experiments"},
            caption="../report/summary.rst",
        ),
    log:
        "logs/summary.log",
    localrule: True
    conda:
        "../../envs/image-diffusion.yaml"
    params:
        script=sha256_file(root / "workflow" / "scripts" / "summary.py"),
        results=lambda wildcards, output: Path(output.page).parent,
        experiments=list(plans),
    shell:
        "logged {log:q} summary.py --results {params.results:q} --benchmarks benchmarks"
        " --experiments {params.experiments:q} --output {output.page:q}"
