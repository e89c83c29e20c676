# crops -> a small classifier: what the metrics look at images with, where no published network fits


rule detect:
    "A small classifier of the data set's own classes: the judge that needs no download."
    input:
        config=files.config("crop"),
        data=f"{results}/datasets/{{dataset}}/crops/manifest.json",
    output:
        description=f"{results}/datasets/{{dataset}}/detector/detector.json",
        weights=f"{results}/datasets/{{dataset}}/detector/detector.safetensors",
    log:
        "logs/datasets/{dataset}/detect.log",
    benchmark:
        "benchmarks/datasets/{dataset}/detect.tsv"
    group:
        machine.shared_job
    conda:
        "../../envs/image-diffusion.yaml"
    threads: machine.threads
    resources:
        **machine.one_process(runtime=60),
    params:
        devices=machine.devices_option,
        code=code["detect"],
        data=subpath(input.data, parent=True),
        output=subpath(output.description, parent=True),
    shell:
        "exec logged {params.devices:q} {log:q} python -m image_diffusion detect --data {params.data:q}"
        " --output {params.output:q}"
