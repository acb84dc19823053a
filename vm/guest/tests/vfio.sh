# shellcheck shell=sh disable=SC2154,SC2086 # set by the suite; addresses hold nothing to be split
# Pinfold's own driver on the machine's controllers, through VFIO.

# The four namespaces.
namespaces="$nvme0/1 $nvme1/1 $nvme2/1 $nvme2/2"

kind_of() {
    case $1 in
        "$nvme0/1") echo "512-byte blocks, MDTS 512 KiB" ;;
        "$nvme1/1") echo "4 KiB blocks, MDTS 16 KiB" ;;
        "$nvme2/1") echo "512-byte blocks, no MDTS" ;;
        "$nvme2/2") echo "4 KiB blocks, no MDTS, second namespace" ;;
    esac
}

# bind_to_vfio BDF: binds it, whatever state the previous test left.
bind_to_vfio() { [ "$(driver_of "$1")" = vfio-pci ] || pinfold bind "$1"; }

# bind_to_kernel BDF: returns it to the kernel's driver.
bind_to_kernel() { [ "$(driver_of "$1")" = nvme ] || pinfold unbind "$1"; }

# IOMMU faults since boot.
faults() { dmesg | grep -c 'DMAR: \[DMA' || true; }

vfio_bind_and_unbind() {
    for bdf in $nvme0 $nvme1 $nvme2; do
        same "driver of $bdf" nvme "$(driver_of $bdf)"
        pinfold bind $bdf
        same "driver of $bdf" vfio-pci "$(driver_of $bdf)"
        pinfold unbind $bdf >/tmp/unbound
        same "output of unbind" "$bdf: vfio-pci -> nvme, group $(group_of $bdf)" "$(cat /tmp/unbound)"
        same "driver of $bdf" nvme "$(driver_of $bdf)"
        disk $bdf 1 >/dev/null
    done
}

vfio_errors_name_the_fix() {
    bind_to_kernel $nvme0
    # The kernel's driver has the disk: the error names the fix.
    refused "pinfold bind $nvme0" pinfold io vfio:$nvme0 --rw read --size 1M
    refused '0000:09:00.0' pinfold io vfio:0000:09:00.0 --rw read --size 1M
    refused '0000:09:00.0' pinfold bind 0000:09:00.0
    bind_to_vfio $nvme0
    refused 'namespace' pinfold io vfio:$nvme0/7 --rw read --size 1M
    # One program at a time.
    pinfold io vfio:$nvme0 --rw read --runtime 1000 --time-based >/tmp/io &
    wait_for_phase $! flight
    refused "$nvme0" pinfold io vfio:$nvme0 --rw read --size 1M
    kill -TERM $!
    code=0
    wait $! || code=$?
    same "exit code" 130 $code
}

vfio_controllers_are_described() {
    for bdf in $nvme0 $nvme1 $nvme2; do
        bind_to_vfio $bdf
        pinfold nvme $bdf >/tmp/nvme
        has /tmp/nvme 'pinfold[012]'
    done
    cat /tmp/nvme
    has /tmp/nvme '4096|4 KiB'
}

vfio_copies() {
    dd if=/dev/urandom of=/tmp/a bs=1000 count="${pieces:-20001}" 2>/dev/null
    for target in $namespaces; do
        bind_to_vfio "${target%/*}"
        for protect in strict revoke batch static; do
            pinfold copy /tmp/a /tmp/b --via "vfio:$target" --protect $protect --force
            cmp /tmp/a /tmp/b
        done
    done
}

# vfio_verifies TARGET PROTECT REQUESTS: at queue depth 1 and 64, polled and by interrupt, a quarter
# of the requests each.
vfio_verifies() {
    target=$1 protect=$2 requests=$(($3 / 4))
    bind_to_vfio "${target%/*}"
    before=$(faults)
    for depth in 1 64; do
        for mode in --poll ''; do
            pinfold io "vfio:$target" --rw randrw --bsrange 512-1M --iodepth $depth --verify-requests $requests --size 16M \
                --protect "$protect" --verify --force $mode >/tmp/io
            has /tmp/io '^Verified: '
            if [ "$mode" ]; then has /tmp/io 'queues .*polled'; else has /tmp/io 'queues .*by interrupt: '; fi
            # With few requests on a busy machine, each may complete before the program polls: then
            # it never sleeps.
            if grep -q 'queues .*by interrupt: .* [1-9][0-9,]* interrupt' /tmp/io; then echo yes >>/tmp/slept; fi
            sed -n "s/^Verified: \(.*\)/depth $depth ${mode:-by interrupt}: \1/p" /tmp/io
        done
    done
    same "IOMMU faults" "$before" "$(faults)"
    note "$(kind_of "$target"), $((4 * requests)) requests"
}

# After all of them.
vfio_verified_by_interrupt() { [ -s /tmp/slept ] || fail "no run by interrupt slept"; }

vfio_several_queues() {
    bind_to_vfio $nvme0
    for mode in --poll ''; do
        pinfold io vfio:$nvme0 --numjobs 2 --rw randrw --bsrange 512-1M --iodepth 16 --verify-requests "${several:-1000}" --size 32M \
            --verify --force $mode >/tmp/io
        has /tmp/io '^Verified: '
        has /tmp/io 'numjobs=2'
    done
}

# With iommufd since Linux 6.13 they are mapped by their file: as a whole, and piece by piece.
vfio_memory_files() {
    free=$(free_hugepages)
    bind_to_vfio $nvme0
    for memory in memfd memfd-2m; do
        for protect in static strict; do
            pinfold -vv io vfio:$nvme0 --memory $memory --protect $protect --rw randrw --bsrange 512-1M --iodepth 16 \
                --verify-requests 300 --size 32M --verify --force >/tmp/io 2>/tmp/log
            has /tmp/io '^Verified: '
            # The kernel that has it is newer than 6.13.
            [ ! -e /dev/iommu ] || has /tmp/log 'mapped by its file'
        done
    done
    same "free hugepages afterwards" "$free" "$(free_hugepages)"
}

vfio_kernel_reads_pinfold_data() {
    for target in $namespaces; do
        bdf=${target%/*}
        bind_to_vfio "$bdf"
        pinfold io "vfio:$target" --rw randrw --bsrange 512-1M --iodepth 16 --verify-requests 300 --size 32M --verify --force >/tmp/io
        wrote=$(sed -n 's/^sha256 of .*: //p' /tmp/io)
        pinfold unbind "$bdf"
        node=$(disk "$bdf" "${target#*/}")
        read=$(dd if="$node" bs=1M count=32 iflag=direct 2>/dev/null | sha256sum)
        same "data that the kernel reads from $node" "$wrote" "${read%% *}"
    done
}

vfio_reads_kernel_data() {
    for target in $nvme1/1 $nvme2/2; do
        bdf=${target%/*}
        bind_to_kernel "$bdf"
        node=$(disk "$bdf" "${target#*/}")
        dd if=/dev/urandom of=/tmp/sample bs=1M count=16 2>/dev/null
        dd if=/tmp/sample of="$node" bs=1M oflag=direct 2>/dev/null
        pinfold bind "$bdf"
        pinfold copy "vfio:$target" /tmp/all --force
        head -c 16777216 /tmp/all | cmp - /tmp/sample
        rm /tmp/all
    done
}
