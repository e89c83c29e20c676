#!/usr/bin/env bash
# A real Slurm on one machine, to try the workflow and to test it: munged, slurmctld and several slurmd with fake GPUs.
#
#   local_slurm.sh up        start it; does nothing when it already answers
#   local_slurm.sh env       print the exports to use it: eval "$(tests/slurm/local_slurm.sh env)"
#   local_slurm.sh status    nodes and jobs
#   local_slurm.sh logs      the last lines of every daemon's log
#   local_slurm.sh down      cancel its jobs, stop its daemons
#   local_slurm.sh purge     down, and delete its folder
#
# Needs Debian's packages slurm-wlm and munge; no root. Everything lies in one folder, nothing else is written.
#
#   LOCAL_SLURM_DIR    that folder; munge wants every parent folder open to all (default: local-slurm-UID in $TMPDIR)
#   LOCAL_SLURM_PORT   first of its TCP ports          (26817)
#   LOCAL_SLURM_NODES  number of slurmd                (2)
#   LOCAL_SLURM_CPUS   CPUs a node claims to have      (4)
#   LOCAL_SLURM_GPUS   fake GPUs a node claims to have (2)
set -euo pipefail

dir=${LOCAL_SLURM_DIR:-${TMPDIR:-/tmp}/local-slurm-$(id -u)}
port=${LOCAL_SLURM_PORT:-26817}
nodes=${LOCAL_SLURM_NODES:-2}
cpus=${LOCAL_SLURM_CPUS:-4}
gpus=${LOCAL_SLURM_GPUS:-2}
host=$(hostname -s)
socket=$dir/munge/socket
export SLURM_CONF=$dir/slurm.conf
PATH=$PATH:/usr/sbin:/sbin

fail() { echo "local_slurm: $*" >&2; exit 1; }

# running NAME PIDFILE: does the file name a live process of that name? A zombie is not alive: nothing may reap it.
running() {
    local pid
    pid=$(cat "$2" 2>/dev/null) && [[ -n $pid ]] || return 1
    grep -qx "Name:[[:space:]]*$1" "/proc/$pid/status" 2>/dev/null || return 1
    ! grep -q '^State:[[:space:]]*[ZX]' "/proc/$pid/status" 2>/dev/null
}

# until_true SECONDS COMMAND...: repeat the command until it succeeds.
until_true() {
    local tries=$(($1 * 10))
    shift
    while ((tries--)); do "$@" >/dev/null 2>&1 && return 0; sleep 0.1; done
    return 1
}

not_running() { ! running "$@"; }

stop() {
    running "$1" "$2" || return 0
    local pid
    pid=$(cat "$2")
    kill "$pid" 2>/dev/null || true
    until_true 5 not_running "$1" "$2" || kill -KILL "$pid" 2>/dev/null || true
    rm -f "$2"
}

write_configuration() {
    ((${#socket} < 100)) || fail "$socket is longer than a socket's name may be; set LOCAL_SLURM_DIR to a shorter one."
    mkdir -p "$dir"/{bin,dev,log,munge,run,spool,state}
    chmod 755 "$dir" "$dir/munge"
    [[ -s $dir/munge/key ]] || (umask 077 && head -c 1024 /dev/urandom >"$dir/munge/key")

    # Snakemake's job step drops SLURM_CONF before it calls srun: these set it again. sbatch hands PATH on to the job.
    local client device
    for client in sacct salloc sbatch scancel scontrol sinfo squeue srun; do
        printf '#!/bin/sh\nSLURM_CONF=%q exec /usr/bin/%s "$@"\n' "$SLURM_CONF" "$client" >"$dir/bin/$client"
        chmod 755 "$dir/bin/$client"
    done

    # A GPU must be a character device; a link to /dev/null is one.
    echo "AutoDetect=off" >"$dir/gres.conf"
    local gres=""
    if ((gpus > 0)); then
        for ((device = 0; device < gpus; device++)); do ln -sfn /dev/null "$dir/dev/gpu$device"; done
        echo "NodeName=n[1-$nodes] Name=gpu Type=fake File=$dir/dev/gpu[0-$((gpus - 1))]" >>"$dir/gres.conf"
        gres="Gres=gpu:fake:$gpus"
    fi

    cat >"$SLURM_CONF" <<CONF
ClusterName=local
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
AuthInfo=socket=$socket
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmdPidFile=$dir/run/slurmd-%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd-%n.log
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
MailProg=/bin/true
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=500
GresTypes=gpu
ReturnToService=2
EnforcePartLimits=ALL
SlurmdTimeout=20
KillWait=10
MinJobAge=600
JobRequeue=1
NodeName=n[1-$nodes] NodeHostname=$host NodeAddr=127.0.0.1 Port=[$((port + 1))-$((port + nodes))] CPUs=$cpus RealMemory=32000 $gres
PartitionName=main Nodes=ALL Default=YES MaxTime=1-0 State=UP
PartitionName=short Nodes=ALL MaxTime=1 State=UP
CONF
}

all_nodes_up() { (($(sinfo -h -N -p main -o %t | grep -cE '^(idle|mix|alloc)$') == nodes)); }

up() {
    command -v munged slurmctld slurmd >/dev/null || fail "slurmctld is not installed. Try: apt-get install slurm-wlm munge"
    running slurmctld "$dir/run/slurmctld.pid" || write_configuration
    if ! running munged "$dir/munge/pid"; then
        rm -f "$socket" "$socket.lock"
        munged --key-file="$dir/munge/key" --socket="$socket" --pid-file="$dir/munge/pid" \
            --log-file="$dir/log/munged.log" --seed-file="$dir/munge/seed" || fail "munged did not start: $dir/log/munged.log"
        until_true 5 munge -n -S "$socket" || fail "munged does not answer: $dir/log/munged.log"
    fi
    running slurmctld "$dir/run/slurmctld.pid" || slurmctld || fail "slurmctld did not start: $dir/log/slurmctld.log"
    until_true 15 scontrol ping || fail "slurmctld does not answer: $dir/log/slurmctld.log"
    for ((node = 1; node <= nodes; node++)); do
        mkdir -p "$dir/spool/n$node"
        running slurmd "$dir/run/slurmd-n$node.pid" || slurmd -N "n$node" || fail "slurmd did not start: $dir/log/slurmd-n$node.log"
    done
    until_true 60 all_nodes_up || { tail -n 5 "$dir"/log/*.log >&2; fail "not every node came up: $dir/log"; }
}

down() {
    if running slurmctld "$dir/run/slurmctld.pid"; then
        timeout 10 scancel --full --user "$(id -un)" 2>/dev/null || true
        until_true 15 bash -c '[[ -z $(timeout 5 squeue -h) ]]' || true
    fi
    local pidfile pid
    for pidfile in "$dir"/run/slurmd-*.pid; do stop slurmd "$pidfile"; done
    for pid in $(pgrep -x slurmstepd || true); do # outlives slurmd by design; ours are those with our configuration
        { tr "\0" "\n" <"/proc/$pid/environ"; } 2>/dev/null | grep -qxF "SLURM_CONF=$SLURM_CONF" && kill "$pid" || true
    done
    stop slurmctld "$dir/run/slurmctld.pid"
    stop munged "$dir/munge/pid"
}

case ${1:-} in
    up) up ;;
    down) down ;;
    purge) down && [[ ! -f $SLURM_CONF ]] || rm -rf -- "$dir" ;;
    env) printf 'export SLURM_CONF=%q PATH=%q:$PATH\n' "$SLURM_CONF" "$dir/bin" ;;
    status) timeout 5 sinfo -N -l && timeout 5 squeue ;;
    logs) tail -n 20 "$dir"/log/*.log ;;
    *) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0" >&2; exit 2 ;;
esac
