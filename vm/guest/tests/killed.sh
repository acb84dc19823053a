# shellcheck shell=sh disable=SC2154,SC2086 # set by the suite; addresses hold nothing to be split
# kill -9 at any moment: the next program must find the controller in order, and nothing may stay behind.

# look PID: sets `phase` to how far the program has come, as seen from outside. A program only moves on, so that a kill lands
# in this phase or a later one.
#   open    it has none of VFIO's files open yet
#   start   it has, and no I/O command has completed: the vectors from 1 on are those of I/O queues, and new in each run
#   flight  one has: from then on `io` keeps its queue full
look() {
    if grep -qE '^ *[0-9]+:[ 0]*[1-9].*vfio-msix\[[1-9][0-9]*\]' /proc/interrupts; then
        phase=flight
    elif ls -l /proc/$1/fd 2>/dev/null | grep -qE '/dev/(vfio|iommu)'; then
        phase=start
    else
        phase=open
    fi
}

# reach PID PHASE: until it has come so far.
reach() {
    while look $1; do
        case $2:$phase in open:* | start:start | *:flight) return ;; esac
        kill -0 $1 2>/dev/null || fail "ended by itself: $(cat /tmp/io)"
    done
}

# pause MILLISECONDS: a random time, no longer than that.
pause() { usleep $(($(od -An -tu2 -N2 /dev/urandom) * $1 / 65 + 1)); }

# held: what the system keeps for programs: hugepages taken and reserved, pages pinned, pages of IOMMU tables, files.
held() {
    grep -E '^HugePages_(Free|Rsvd|Surp)' /proc/meminfo
    echo 1 >/proc/sys/vm/stat_refresh
    awk '/^nr_foll_pin_acquired /{ pinned += $2 } /^nr_foll_pin_released /{ pinned -= $2 } /^nr_iommu_pages /{ tables = $2 }
        END { print "pinned " pinned "\ntables " tables }' /proc/vmstat
    find /tmp /run /dev/shm /dev/hugepages /dev/vfio
}

# The kernel opens a group for one file at a time, and an iommufd device for one.
openable() {
    for node in /dev/vfio/$(group_of $nvme0) /dev/vfio/devices/*; do
        [ ! -c $node ] || ( : <>$node ) 2>/dev/null || return 1
    done
}

start_io() {
    pinfold io vfio:$nvme0 --rw randrw --bs 64k --iodepth 32 --runtime 60 --time-based --force >/tmp/io 2>&1 &
    pid=$!
}

# nothing_stays WHEN: no program, nothing bound, mapped, pinned or reserved beyond what /tmp/held-before says.
nothing_stays() {
    openable || fail "$1: the group cannot be opened"
    held >/tmp/held-after
    diff /tmp/held-before /tmp/held-after || fail "$1: something stays held"
}

# The kernel's driver and then Pinfold's can have the controller.
rebindable() {
    pinfold unbind $nvme0
    disk $nvme0 1 >/dev/null
    pinfold bind $nvme0
    pinfold io vfio:$nvme0 --rw randrw --bs 4k --iodepth 8 --size 1M --verify --force >/tmp/io
    has /tmp/io '^Verified: '
}

killed_at_any_moment() {
    times=$1
    taken $nvme0
    rebindable
    : >/tmp/held-after >/tmp/held-before
    held >/tmp/held-before
    seen=$(faults)
    nothing_stays "before the first"
    # What is looked for is seen where it is there.
    start_io
    reach $pid flight
    ! openable || fail "a group in use can be opened: the check sees nothing"
    held >/tmp/held-after
    for kind in HugePages_Free pinned tables; do
        [ "$(grep "^$kind" /tmp/held-before)" != "$(grep "^$kind" /tmp/held-after)" ] ||
            fail "a program that runs holds no $kind: the check sees nothing"
    done
    kill -9 $pid
    wait $pid || true
    nothing_stays "after the first"

    killed=0 open=0 start=0 flight=0
    while [ $killed -lt "$times" ]; do
        start_io
        # Of each eight kills one before it opens, two while it starts, five with commands in flight.
        case $((killed % 8)) in
            0) pause 10 ;;
            1 | 2) reach $pid start; pause 100 ;;
            *) reach $pid flight; pause 50 ;;
        esac
        look $pid
        kill -9 $pid || fail "ended by itself: $(cat /tmp/io)"
        if wait $pid; then code=0; else code=$?; fi
        same "exit code" 137 $code
        eval "$phase=\$(($phase + 1))"
        killed=$((killed + 1))
        nothing_stays "after kill $killed, which landed in '$phase'"
        [ $((killed % 50)) != 0 ] || rebindable
    done
    rebindable
    nothing_stays "at the end"
    note "$killed times: $open before open, $start during start, $flight with commands in flight; $(($(faults) - seen)) faults seen by the IOMMU"
    [ $open -gt 0 ] && [ $start -gt 0 ] || fail "none before open or none during start"
    [ $((flight * 2)) -ge $killed ] || fail "fewer than half with commands in flight"
}
