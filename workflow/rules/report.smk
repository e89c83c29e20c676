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
        "logged {log:q} report.py --experiment {params.experiment:q} --data {params.data:q}" " --output {output.page:q}"
