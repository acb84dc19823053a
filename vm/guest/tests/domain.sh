# shellcheck shell=sh disable=SC2154,SC2086 # set by the suite; addresses hold nothing to be split
# What a domain promises where the kernel keeps its table, by type1 and, where the kernel has it, by iommufd.

ways() { if [ -c /dev/iommu ]; then echo type1 iommufd; else echo type1; fi; }

domain_keeps_its_promises() {
    taken $nvme0
    taken $nvme1
    for way in $(ways); do vfio_check $nvme0 $way with=$nvme1; done
    note "by $(ways)"
}

domain_names_the_limit_of_entries() {
    taken $nvme0
    parameter=/sys/module/vfio_iommu_type1/parameters/dma_entry_limit
    kept=$(cat $parameter)
    echo 16 >$parameter
    if vfio_check $nvme0 type1 entries; then code=0; else code=$?; fi
    echo "$kept" >$parameter
    return $code
}

domain_names_memlock() {
    taken $nvme0
    chmod 666 /dev/vfio/vfio
    for node in /dev/vfio/$(group_of $nvme0) /dev/vfio/devices/* /dev/iommu; do
        [ ! -c "$node" ] || chown 1000:1000 "$node"
    done
    for way in $(ways); do as_user 8192 vfio_check $nvme0 $way memlock; done
}

domain_is_measured() {
    taken $nvme0
    pinfold bench vfio --quick --json >/tmp/bench
    for subject in pages-4k pages-2m cached; do
        has /tmp/bench "\"case\":\"map-4k\",\"subject\":\"$subject\""
    done
    note "$(sed -n 's/.*"case":"\(map-[48][km]\)","subject":"\([^"]*\)".*"median":\([0-9]*\).*/\1 \2 \3 ns/p' /tmp/bench | tr '\n' ',')"
}
