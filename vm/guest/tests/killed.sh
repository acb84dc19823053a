# shellcheck shell=sh disable=SC2154,SC2086 # set by the suite; addresses hold nothing to be split
# kill -9 at any moment: the next program must be able to use the controller, and nothing may leak.

# observe_phase PID: sets `phase` to the program's progress as seen from outside. Phases only
# advance, so a kill lands in this phase or a later one.
#   open    it has not opened a file of VFIO yet
#   start   it has, and no I/O command has completed: vectors from 1 on belong to I/O queues, and are new in each run
#   flight  one has completed: from then on `io` keeps its queue full
observe_phase() {
    if grep -qE '^ *[0-9]+:[ 0]*[1-9].*vfio-msix\[[1-9][0-9]*\]' /proc/interrupts; then
        phase=flight
    elif ls -l /proc/$1/fd 2>/dev/null | grep -qE '/dev/(vfio|iommu)'; then
        phase=start
    else
        phase=open
    fi
}

# wait_for_phase PID PHASE: waits until the program is in that phase or a later one.
wait_for_phase() {
    while observe_phase $1; do
        case $2:$phase in open:* | start:start | *:flight) return ;; esac
        kill -0 $1 2>/dev/null || fail "exited early: $(cat /tmp/io)"
    done
}

# pause MILLISECONDS: sleeps a random time up to that.
pause() { usleep $(($(od -An -tu2 -N2 /dev/urandom) * $1 / 65 + 1)); }

# held_resources: prints what the system holds for programs: hugepages in use and reserved, pinned
# pages, IOMMU table pages, files.
held_resources() {
    grep -E '^HugePages_(Free|Rsvd|Surp)' /proc/meminfo
    echo 1 >/proc/sys/vm/stat_refresh
    awk '/^nr_foll_pin_acquired /{ pinned += $2 } /^nr_foll_pin_released /{ pinned -= $2 } /^nr_iommu_pages /{ tables = $2 }
        END { print "pinned " pinned "\ntables " tables }' /proc/vmstat
    find /tmp /run /dev/shm /dev/hugepages /dev/vfio
}

# The kernel opens a group for one file at a time, and an iommufd device for one.
group_is_free() {
    for node in /dev/vfio/$(group_of $nvme0) /dev/vfio/devices/*; do
        [ ! -c $node ] || ( : <>$node ) 2>/dev/null || return 1
    done
}

start_io() {
    pinfold io vfio:$nvme0 --rw randrw --bs 64k --iodepth 32 --runtime 60 --time-based --force >/tmp/io 2>&1 &
    pid=$!
}

# nothing_leaked WHEN: no program has the device open, and nothing is mapped, pinned or reserved
# beyond /tmp/held-before.
nothing_leaked() {
    group_is_free || fail "$1: the group cannot be opened"
    # The kernel frees some of them a little later.
    waited=0
    until held_resources >/tmp/held-after && cmp -s /tmp/held-before /tmp/held-after; do
        waited=$((waited + 1))
        [ $waited -lt 100 ] || { diff /tmp/held-before /tmp/held-after; fail "$1: resources leaked"; }
        sleep 0.1
    done
}

# The kernel's driver and then Pinfold's can use the controller.
check_rebind() {
    pinfold unbind $nvme0
    disk $nvme0 1 >/dev/null
    pinfold bind $nvme0
    pinfold io vfio:$nvme0 --rw randrw --bs 4k --iodepth 8 --size 1M --verify --force >/tmp/io
    has /tmp/io '^Verified: '
}

killed_at_any_moment() {
    times=$1
    bind_to_vfio $nvme0
    check_rebind
    : >/tmp/held-after >/tmp/held-before
    held_resources >/tmp/held-before
    seen=$(faults)
    nothing_leaked "before the first"
    # The checks detect a program that runs.
    start_io
    wait_for_phase $pid flight
    ! group_is_free || fail "a group in use can be opened: the check is blind"
    held_resources >/tmp/held-after
    for kind in HugePages_Free pinned tables; do
        [ "$(grep "^$kind" /tmp/held-before)" != "$(grep "^$kind" /tmp/held-after)" ] ||
            fail "a running program holds no $kind: the check is blind"
    done
    kill -9 $pid
    wait $pid || true
    nothing_leaked "after the first"

    killed=0 open=0 start=0 flight=0
    while [ $killed -lt "$times" ]; do
        start_io
        # Of every eight kills: one before the open, two during start, five with commands in flight.
        # On a busy host a pause may last until the next phase: there is none before the first kill
        # of a kind.
        case $((killed % 8)) in
            0) [ $open = 0 ] || pause 10 ;;
            1 | 2) wait_for_phase $pid start; [ $start = 0 ] || pause 100 ;;
            *) wait_for_phase $pid flight; pause 50 ;;
        esac
        observe_phase $pid
        kill -9 $pid || fail "exited early: $(cat /tmp/io)"
        if wait $pid; then code=0; else code=$?; fi
        same "exit code" 137 $code
        eval "$phase=\$(($phase + 1))"
        killed=$((killed + 1))
        nothing_leaked "after kill $killed, which landed in '$phase'"
        [ $((killed % 50)) != 0 ] || check_rebind
    done
    check_rebind
    nothing_leaked "at the end"
    note "$killed times: $open before open, $start during start, $flight with commands in flight; $(($(faults) - seen)) faults seen by the IOMMU"
    [ $open -gt 0 ] && [ $start -gt 0 ] || fail "none before open or none during start"
    [ $((flight * 2)) -ge $killed ] || fail "fewer than half with commands in flight"
}
