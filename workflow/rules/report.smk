rule report:
    "Everything that was found about an experiment, on one page."
    input:
        **files.inputs("datasheet"),
        results=files.outputs,
    output:
        page=shown(
            f"{results}/{{experiment}}/report/index.html", "experiment", "Experiments", experiment="{experiment}"
        ),
    log:
        "logs/{experiment}/report.log",
    localrule: True
    conda:
        "../../envs/image-diffusion.yaml"
    params:
        pages=context.pages,
        experiment=subpath(output.page, ancestor=2),
        data=lambda wildcards: Path(files.training_data(wildcards)).parent,
    shell:
        "exec logged {log:q} report.py --experiment {params.experiment:q} --data {params.data:q}"
        " --benchmarks benchmarks --output {output.page:q}"


rule summary:
    "A line for each experiment, on a page and in the terminal."
    input:
        results=files.outputs,
    output:
        page=shown(f"{results}/summary.html", "summary", "Summary", page="all experiments"),
    log:
        "logs/summary.log",
    localrule: True
    conda:
        "../../envs/image-diffusion.yaml"
    params:
        pages=context.pages,
        results=subpath(output.page, parent=True),
        experiments=list(plans.by_name),
    shell:
        "exec logged {log:q} summary.py --results {params.results:q} --benchmarks benchmarks"
        " --experiments {params.experiments:q} --output {output.page:q}"
