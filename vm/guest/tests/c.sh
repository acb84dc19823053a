# shellcheck shell=sh disable=SC2154
# Drivers in C on libpinfold, linked statically: crates/capi/examples/nvme_driver.c, and
# crates/capi/tests/c/driver.c, which is also run on the devices of `pinfold check`.

nvme_driver_in_c() {
    reads=$((requests < 100000 ? requests : 100000))
    before=$(faults)
    bind_to_vfio "$nvme0"
    # The second run finds what the first has left.
    for count in "$reads" 100; do
        /test/nvme_driver_c "$nvme0" "$count" >/tmp/driver
        has /tmp/driver '^model [^ ]'
        has /tmp/driver "^$count reads of [0-9]+ bytes"
        [ "$count" = 100 ] || note "$(tail -n 1 /tmp/driver)"
    done
    same "IOMMU faults" "$before" "$(faults)"
    bind_to_kernel "$nvme0"
}

# Configuration space, registers, interrupts, reset, two devices in one domain, an imported IOAS.
devices_in_c() {
    before=$(faults)
    bind_to_vfio "$nvme0"
    bind_to_vfio "$nvme1"
    if [ -c /dev/iommu ]; then word=all; else word=type1; fi
    /test/driver_c "$word" >/tmp/driver
    has /tmp/driver '^driver: ok'
    same "IOMMU faults" "$before" "$(faults)"
    bind_to_kernel "$nvme0"
    bind_to_kernel "$nvme1"
    note "by $(interfaces)"
}
