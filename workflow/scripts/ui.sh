#!/bin/sh
# Review the runs of an MLflow database in the browser: a small server on loopback, nothing sent anywhere.
#   sh workflow/scripts/ui.sh [database, mlflow.db] [port, 5000]
set -eu
database=${1:-mlflow.db}
port=${2:-5000}
if [ ! -f "$database" ]; then
    echo "error: $database does not exist. Run an experiment first: make demo" >&2
    exit 1
fi
database=$(cd "$(dirname "$database")" && pwd)/$(basename "$database")
python=$(dirname "$0")/../../.venv/bin/python
[ -x "$python" ] || python=python
page="http://127.0.0.1:$port/#/experiments/1/runs?workflowType=machine_learning"
echo "Runs    $page&viewStateShareKey=trainings"
echo "Charts  $page&compareRunsMode=CHART"
echo "Ctrl-C ends it."
export MLFLOW_DISABLE_TELEMETRY=true MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false
exec "$python" -m mlflow server --backend-store-uri "sqlite:///$database" \
    --default-artifact-root "$(dirname "$database")/mlruns" --host 127.0.0.1 --port "$port" --workers 1
