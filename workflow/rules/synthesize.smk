rule synthesize:
    "A data set of a model's images with a scorecard; where the requirement does not hold, `quarantine` beside it."
    input:
        **files.of_model("synthesize", before="sample"),
        **files.inputs("codec", "pairs", "own_features", "synthesize_table"),
        sample=files.config("sample"),
        data=files.real_data,
        detector=files.own_detector,
        parts=parts.synthesized_parts,
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
        **parts.options(),
        **files.options("trained_by", "codec", "pairs", "own_features"),
        devices=machine.devices_option,
        code=code["synthesize"],
        other_files=files.synthesize_stamps,
    shell:
        "exec logged {params.devices:q} {log:q} python -m image_diffusion synthesize --config {input.config:q} --sample"
        " {input.sample:q} --weights {input.weights:q} {params.trained_by:q} {params.codec:q} --data {input.data:q}"
        " {params.pairs:q} --detector {input.detector:q} {params.own_features:q} {params.parts:q} {params.part:q}"
        " --output {params.written:q} {params.journal:q}"


use rule synthesize as synthesize_part with:
    "A part of the images of a data set; `synthesize` then joins the parts, and they go."
    output:
        images=temp(f"{results}/{{experiment}}/synthetic_parts/part-{{part}}-of-{{parts}}.npz"),
    log:
        "logs/{experiment}/synthesize/part-{part}-of-{parts}.log",
    benchmark:
        "benchmarks/{experiment}/synthesize/part-{part}-of-{parts}.tsv"
