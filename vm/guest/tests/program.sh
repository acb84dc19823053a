# shellcheck shell=sh disable=SC2154,SC2086 # set by the suite; addresses hold nothing to be split
# The program in the guest, without a real device.

program_doctor_sees_the_machine() {
    pinfold doctor >/tmp/doctor
    has /tmp/doctor '^good +IOMMU groups .*dmar0'
    has /tmp/doctor "^good +hugepages 2 MiB +$hugepages free of $hugepages reserved"
    has /tmp/doctor '^(good|limited) +VFIO '
    if [ -c /dev/iommu ]; then has /tmp/doctor '^good +iommufd'; else has /tmp/doctor '^missing +iommufd'; fi
}

program_copies_through_the_model() {
    dd if=/dev/urandom of=/tmp/a bs=1M count=16 2>/dev/null
    for protect in strict revoke batch static; do
        pinfold copy /tmp/a /tmp/b --via soft:32M --protect $protect --force
        cmp /tmp/a /tmp/b
    done
}

program_verifies_the_model() {
    pinfold io soft:16M --rw randrw --bsrange 512-1M --iodepth 64 --verify-requests 2000 --verify >/tmp/io
    has /tmp/io '^Verified: 2,000 requests'
}

program_uses_and_frees_hugepages() {
    before=$(free_hugepages)
    pinfold io soft:256M --rw randread --runtime 1000 --time-based --bs 1M --iodepth 16 >/tmp/io &
    until [ "$(free_hugepages)" -lt "$before" ]; do kill -0 $! || fail "no hugepage was in use while it ran"; done
    kill -TERM $!
    code=0
    wait $! || code=$?
    same "exit code" 130 $code
    same "free hugepages afterwards" "$before" "$(free_hugepages)"
}

# The kernel's own disks, as on a machine where nothing is bound to VFIO.
program_uses_block_devices() {
    node=$(disk $nvme1 1)
    refused 'holds data that would be overwritten' pinfold io "$node" --rw randwrite --size 16M
    pinfold io "$node" --rw randrw --bsrange 4k-256k --iodepth 16 --verify-requests 500 --size 16M --verify --force >/tmp/io
    has /tmp/io '^Verified: 500 requests'
    pinfold copy "$node" /tmp/whole --size 16M --verify
    cmp -n 16777216 "$node" /tmp/whole
    refused '268435456' pinfold io "$node" --rw randread --size 257M
    refused 'not a regular file' pinfold copy /tmp/whole "$node" --force
    refused 'without soft:' pinfold copy "soft:$node" /tmp/other
    # In use by the kernel: read, not written.
    mkswap "$node" >/dev/null
    swapon "$node"
    refused 'in use: unmount it' pinfold io "$node" --rw randwrite --size 1M --force
    pinfold io "$node" --rw randread --size 1M
    swapoff "$node"
}
