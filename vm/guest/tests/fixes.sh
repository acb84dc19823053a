# shellcheck shell=sh disable=SC2154 # set by the suite
# The fixes that change the machine: each is carried out as it is printed, and then what was refused
# works. `tools/cli/tests/program/fixes.rs` lists them all.

# Runs a printed fix as root, as this machine's user is.
as_printed() {
    mkdir -p /tmp/sudo
    printf '#!/bin/sh\nexec "$@"\n' >/tmp/sudo/sudo
    chmod +x /tmp/sudo/sudo
    [ -n "$1" ] || fail "no fix is printed"
    PATH=/tmp/sudo:$PATH sh -c "$1"
}

# line_of WHAT [COMMAND ...]: doctor's line about it, run by the command. fix_of: its fix.
line_of() {
    what=$1
    shift
    "$@" pinfold doctor | grep -E -A 1 "^[a-z]+ +$what  "
}
fix_of() { line_of "$@" | sed -n 's/^ *fix: //p'; }

# good WHAT [COMMAND ...]
good() { line_of "$@" | grep -q '^good' || fail "not good: $(line_of "$@")"; }

# in_group GROUP COMMAND [ARGS]: runs it in a control group.
in_group() {
    group=$1
    shift
    sh -c 'echo $$ >"$0/cgroup.procs" && exec "$@"' "$group" "$@"
}

# Exceeding memory.high is not refused: the process is throttled.
fixes_memory_high() {
    if ! grep -q cgroup2 /proc/filesystems; then
        note "skipped: this kernel has no control groups"
        return
    fi
    mkdir -p /tmp/cgroup
    mount -t cgroup2 none /tmp/cgroup
    echo +memory >/tmp/cgroup/cgroup.subtree_control
    mkdir /tmp/cgroup/high
    echo 64M >/tmp/cgroup/high/memory.high
    line_of memory in_group /tmp/cgroup/high | grep -q '^limited.*memory.high'
    run="pinfold io soft:64M --rw write --bs 1M --size 64M --memory plain --iodepth 8"
    # shellcheck disable=SC2086
    refused 'allowed by .*memory.high' in_group /tmp/cgroup/high timeout 60 $run
    as_printed "$(fix_of memory in_group /tmp/cgroup/high)"
    good memory in_group /tmp/cgroup/high
    # shellcheck disable=SC2086
    in_group /tmp/cgroup/high timeout 120 $run
    # The last process leaves it some time after its end.
    until rmdir /tmp/cgroup/high 2>/dev/null; do sleep 0.1; done
    umount /tmp/cgroup
}

fixes_hugepages() {
    echo 0 >/proc/sys/vm/nr_hugepages
    run="pinfold io soft:8M --size 8M --bs 256k --memory hugetlb-2m --iodepth 4"
    # shellcheck disable=SC2086
    refused 'fix: sudo sysctl vm.nr_hugepages=' $run
    as_printed "$(sed 's/.*fix: //; s/; .*//' /tmp/refused)"
    # shellcheck disable=SC2086
    $run
    echo 0 >/proc/sys/vm/nr_hugepages
    as_printed "$(fix_of 'hugepages 2 MiB')"
    good 'hugepages 2 MiB'
    good memory
    # A pool of nearly all memory, as advice once was; with all of it the kernel ends programs.
    available=$(sed -n 's/^MemAvailable: *\([0-9]*\) kB/\1/p' /proc/meminfo)
    echo $(($(cat /proc/sys/vm/nr_hugepages) + (available - 153600) / 2048)) >/proc/sys/vm/nr_hugepages
    line_of memory | grep -q '^limited.*unused hugepages'
    as_printed "$(fix_of memory)"
    good memory
    echo never >/sys/kernel/mm/transparent_hugepage/enabled
    as_printed "$(fix_of 'transparent hugepages')"
    echo "$hugepages" >/proc/sys/vm/nr_hugepages
    as_printed 'sudo sysctl vm.compact_memory=1'
    good 'transparent hugepages'
}

# If the machine has too little memory, no command is printed; otherwise it works or says why not.
fixes_gigantic_pages() {
    pool=/sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages
    if [ ! -e $pool ]; then
        note "no pages of 1 GiB"
        return
    fi
    echo 0 >/proc/sys/vm/nr_hugepages
    fix=$(fix_of 'hugepages 1 GiB')
    if [ -z "$fix" ]; then
        line_of 'hugepages 1 GiB' | grep -q 'too little'
        note "none advised"
    elif as_printed "$fix" 2>/tmp/why; then
        good 'hugepages 1 GiB'
        note "reserved"
    else
        grep -q 'boot with hugepagesz=1G' /tmp/why
        note "fragmented"
    fi
    echo 0 >$pool
    echo "$hugepages" >/proc/sys/vm/nr_hugepages
}

fixes_overcommit() {
    kept=$(cat /proc/sys/vm/overcommit_ratio)
    used=$(sed -n 's/^Committed_AS: *\([0-9]*\) kB/\1/p' /proc/meminfo)
    echo $((used + 65536)) >/proc/sys/vm/overcommit_kbytes
    echo 2 >/proc/sys/vm/overcommit_memory
    line_of 'commit limit' | grep -q '^limited'
    dd if=/dev/urandom of=/tmp/a bs=1M count=48 2>/dev/null
    for run in "copy /tmp/a /tmp/b --via soft:64M --force" "io soft:64M --size 64M --bs 1M --rw write" "io soft:64M --size 1M --numjobs 16"; do
        # shellcheck disable=SC2086
        if pinfold $run --memory plain >/tmp/io 2>&1; then code=0; else code=$?; fi
        [ $code -le 2 ] || { cat /tmp/io; fail "$run: ended with $code"; }
    done
    refused 'vm.overcommit_memory is 2' pinfold io soft:64M --size 64M --bs 1M --rw write --memory plain
    as_printed "$(fix_of 'commit limit')"
    good 'commit limit'
    pinfold io soft:64M --size 64M --bs 1M --rw write --memory plain
    echo 0 >/proc/sys/vm/overcommit_memory
    echo "$kept" >/proc/sys/vm/overcommit_ratio
    for part in /tmp/.pinfold-*; do [ ! -e "$part" ] || fail "left: $part"; done
}

fixes_switches() {
    if [ -e /proc/sys/kernel/io_uring_disabled ]; then
        echo 2 >/proc/sys/kernel/io_uring_disabled
        as_printed "$(fix_of io_uring)"
        good io_uring
    fi
    kept=$(cat /proc/sys/kernel/threads-max)
    running=$(sed 's|.*/\([0-9]*\) .*|\1|' /proc/loadavg)
    echo $((running + 20)) >/proc/sys/kernel/threads-max
    as_printed "$(fix_of threads)"
    good threads
    echo "$kept" >/proc/sys/kernel/threads-max
}

# Without the modules that the machine starts with.
fixes_modules() {
    if [ ! -d /sys/module/vfio_pci ] || ! ls /modules/*vfio-pci.ko >/dev/null 2>&1; then
        note "VFIO is built in"
        return
    fi
    folder=/lib/modules/$(uname -r)
    mkdir -p "$folder/kernel"
    for module in /modules/*.ko; do
        plain=${module##*/}
        cp "$module" "$folder/kernel/${plain#*-}"
    done
    depmod 2>/dev/null || { note "no depmod"; return; }
    for bdf in $nvme0 $nvme1 $nvme2 $vblk $sata; do
        [ "$(driver_of "$bdf")" != vfio-pci ] || pinfold unbind "$bdf"
    done
    rmmod vfio_pci vfio_pci_core vfio_iommu_type1 vfio
    line_of VFIO | grep -q '^missing'
    as_printed "$(fix_of VFIO)"
    line_of VFIO | grep -q 'no device is bound'
    modprobe vfio_iommu_type1
}
