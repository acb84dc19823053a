# shellcheck shell=sh disable=SC2154,SC2086 # set by the suite; addresses hold nothing to be split
# Lowered limits, and devices that are removed.

# as_user KIB COMMAND [ARGS]: runs it as user 1000, who may pin KIB and has no privileges.
as_user() {
    kib=$1
    program=$2
    shift 2
    (
        # shellcheck disable=SC3045 # busybox has it
        ulimit -l "$kib"
        exec start-stop-daemon -S -q -c 1000:1000 -x "/bin/$program" -- "$@"
    )
}

group_of() { basename "$(readlink "/sys/bus/pci/devices/$1/iommu_group")"; }

limits_memlock_is_reported() {
    bind_to_vfio $nvme0
    node=/dev/vfio/$(group_of $nvme0)
    chown 1000:1000 "$node"
    chmod 666 /dev/vfio/vfio
    before=$(free_hugepages)
    refused 'RLIMIT_MEMLOCK.*memlock=' as_user 256 pinfold io vfio:$nvme0 --rw read --size 1M
    note "$(cat /tmp/refused)"
    same "free hugepages" "$before" "$(free_hugepages)"
    # With enough of it an ordinary user needs nothing else.
    as_user 262144 pinfold io vfio:$nvme0 --rw randrw --bs 4k --iodepth 8 --size 1M --verify --force >/tmp/io
    has /tmp/io '^Verified: '
    chown 0:0 "$node"
}

limits_entries_are_reported() {
    # With iommufd, which is preferred, there is a limit of bytes only.
    if [ -c /dev/iommu ]; then
        note "iommufd has no such limit"
        return
    fi
    bind_to_vfio $nvme0
    parameter=/sys/module/vfio_iommu_type1/parameters/dma_entry_limit
    kept=$(cat $parameter)
    before=$(free_hugepages)
    echo 2 >$parameter
    # With strict revocation each buffer in flight is an entry.
    if pinfold io vfio:$nvme0 --rw randread --bs 64k --iodepth 64 --size 16M --protect strict >/tmp/io 2>&1; then code=0; else code=$?; fi
    cat /tmp/io
    [ $code = 1 ] || fail "must have failed with 1, not $code"
    has /tmp/io 'entries|mappings'
    note "$(tail -n 1 /tmp/io)"
    same "free hugepages" "$before" "$(free_hugepages)"
    # The command in the message, and the same once more.
    as_printed "$(sed -n 's/.*\(echo [0-9]* | sudo tee [^,]*\),.*/\1/p' /tmp/io | tail -n 1)" >/dev/null
    pinfold io vfio:$nvme0 --rw randread --bs 64k --iodepth 64 --size 16M --protect strict
    echo "$kept" >$parameter
    pinfold io vfio:$nvme0 --rw randrw --bs 4k --iodepth 8 --size 1M --verify --force >/tmp/io
}

# pull BDF: surprise removal. Switches the slot's power off, on which QEMU removes the device from
# the bus at once, while the slot's interrupts are off; then restores the slot, which is empty and
# reports it. The kernel is not asked first.
pull() {
    port=$(dirname "$(readlink -f "/sys/bus/pci/devices/$1")")
    byte() { od -An -tu1 -j "$1" -N1 "$port/config" | tr -d ' '; }
    # The PCI Express capability, and in it Slot Control (PCI Express base specification, 7.5.3.10).
    at=$(byte 52)
    while [ "$(byte "$at")" != 16 ]; do at=$(byte $((at + 1))); done
    at=$((at + 24))
    before=$(($(od -An -tu2 -j "$at" -N2 "$port/config")))
    # Power off (bit 10), power indicator off (bits 9 and 8), no interrupts (bit 5).
    word $(((before | 0x700) & ~0x20)) >/tmp/off
    word $before >/tmp/on
    # Both without a pause: a driver that closes the device in between makes the kernel reset a
    # missing device, for 60 s.
    dd if=/tmp/off of="$port/config" bs=2 seek=$((at / 2)) conv=notrunc 2>/dev/null
    dd if=/tmp/on of="$port/config" bs=2 seek=$((at / 2)) conv=notrunc 2>/dev/null
}

# word N: prints its two bytes.
# shellcheck disable=SC2059 # the format is the bytes
word() { printf "\\$(printf %03o $(($1 & 255)))\\$(printf %03o $(($1 >> 8)))"; }

# ends_with_error PID SECONDS: the program exits within that time, with an error and not by a
# signal.
ends_with_error() {
    began=$(hundredths)
    while kill -0 "$1" 2>/dev/null; do
        [ $(($(hundredths) - began)) -lt $(($2 * 100)) ] || fail "still running after $2 s"
        sleep 0.1
    done
    took=$(($(hundredths) - began))
    if wait "$1"; then code=0; else code=$?; fi
    cat /tmp/io
    same "exit code" 1 "$code"
    note "after $((took / 100)).$((took % 100 / 10)) s: $(tail -n 1 /tmp/io)"
}

vfio_surprise_removal() {
    bind_to_vfio $nvme1
    free=$(free_hugepages)
    pinfold io vfio:$nvme1 --rw randrw --bs 64k --iodepth 32 --runtime 100 --time-based --force $1 >/tmp/io 2>&1 &
    pid=$!
    wait_for_phase $pid flight
    sleep 1
    kill -0 $pid
    pull $nvme1
    ends_with_error $pid 120
    same "free hugepages" "$free" "$(free_hugepages)"
}

vfio_device_del() {
    bind_to_vfio $nvme2
    before=$(free_hugepages)
    pinfold io vfio:$nvme2/1 --rw randrw --bs 64k --iodepth 32 --runtime 100 --time-based --force >/tmp/io 2>&1 &
    pid=$!
    wait_for_phase $pid flight
    sleep 1
    kill -0 $pid
    # QEMU presses the slot's attention button; five seconds later the kernel requests the device
    # from its user.
    echo "device_del nvme2" >/dev/host-control
    ends_with_error $pid 240
    same "free hugepages" "$before" "$(free_hugepages)"
    waited=0
    while [ -e /sys/bus/pci/devices/$nvme2 ]; do
        sleep 0.5
        waited=$((waited + 1))
        [ $waited -lt 120 ] || fail "the device is still on the bus"
    done
}
