rule synthesize:
    "A data set of a model's images with a scorecard; where the requirement does not hold, `quarantine` beside it."
    input:
        **files.inputs("codec", "own_features"),
        config=files.config("synthesize"),
        sample=files.config("sample"),
        before=files.configs_before("sample"),
        weights=f"{results}/{{experiment}}/train/weights.safetensors",
        data=files.real_data,
        detector=files.own_detector,
    output:
        folder=directory(f"{results}/{{experiment}}/synthetic"),
    log:
        "logs/{experiment}/synthesize.log",
    benchmark:
        "benchmarks/{experiment}/synthesize.tsv"
    group:
        machine.shared_job
    conda:
        "../../envs/image-diffusion.yaml"
    threads: machine.threads
    resources:
        **machine.one_process(),
    params:
        **files.options("trained_by", "codec", "own_features"),
        devices=machine.devices_option,
        code=code["synthesize"],
        decoder=files.stamps("decoder_files"),
        journal=f"{results}/{{experiment}}/journal",
    shell:
        "exec logged {params.devices:q} {log:q} python -m image_diffusion synthesize --config {input.config:q} --sample"
        " {input.sample:q} --weights {input.weights:q} {params.trained_by:q} {params.codec:q} --data {input.data:q}"
        " --detector {input.detector:q} {params.own_features:q} --output {output.folder:q} --journal {params.journal:q}"
