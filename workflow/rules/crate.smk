rule crate:
    "An experiment as a Workflow Run RO-Crate: results/EXPERIMENT/ro-crate-metadata.json."
    input:
        results=files.outputs,
        report=f"{results}/{{experiment}}/report/index.html",
        given=files.configurations,
    output:
        metadata=f"{results}/{{experiment}}/ro-crate-metadata.json",
        copies=directory(f"{results}/{{experiment}}/crate"),
    log:
        "logs/{experiment}/crate.log",
    localrule: True
    conda:
        "../../envs/image-diffusion.yaml"
    params:
        code=code["export"],
        experiment=subpath(output.metadata, parent=True),
        snakefile=root / "workflow" / "Snakefile",
    shell:
        "exec logged {log:q} python -m image_diffusion export --crate {params.experiment:q}"
        " --snakefile {params.snakefile:q} --inputs {input.given:q}"
