# everything that was found -> one page


rule report:
    "Everything that was found about an experiment, on one page."
    input:
        results=files.made,
        datasheet=files.datasheet,
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
        pages=known.pages,
        experiment=subpath(output.page, ancestor=2),
        data=files.data_folder,
    shell:
        "exec logged {log:q} report.py --experiment {params.experiment:q} --data {params.data:q} --benchmarks benchmarks"
        " --output {output.page:q}"


rule summary:
    "A line for each experiment, on a page and in the terminal."
    input:
        results=files.made,
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
        pages=known.pages,
        results=subpath(output.page, parent=True),
        experiments=list(plans.by_name),
    shell:
        "exec logged {log:q} summary.py --results {params.results:q} --benchmarks benchmarks"
        " --experiments {params.experiments:q} --output {output.page:q}"
