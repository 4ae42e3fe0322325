{{- /* Parts of the admission policies' CEL expressions. Strings of the values become literals with toJson, which escapes
them as CEL does. */ -}}

{{- /* What decides of the object in the variable: a pod, the template of a workload, or a namespace. dyn: these kinds have
different fields. */ -}}
{{- define "detour.cel.template" -}}
(request.kind.kind in ['Pod', 'Namespace'] ? dyn({{ . }})
  : request.kind.kind == 'PodTemplate' ? dyn({{ . }}).template
  : request.kind.kind == 'CronJob' ? dyn({{ . }}).spec.jobTemplate.spec.template
  : dyn({{ . }}).spec.template)
{{- end -}}

{{- /* Whether a LabelSelector selects the namespace. */ -}}
{{- define "detour.cel.selects" -}}
{{- $all := list -}}
{{- $requirements := .matchExpressions | default list -}}
{{- range $key, $value := .matchLabels -}}
{{- $requirements = append $requirements (dict "key" $key "operator" "In" "values" (list $value)) -}}
{{- end -}}
{{- range $requirements -}}
{{- $label := printf "variables.ownNamespace.?metadata.?labels[?%s]" (toJson .key) -}}
{{- $in := printf "(%s.hasValue() && %s.value() in %s)" $label $label (toJson (.values | default list)) -}}
{{- $all = append $all (get (dict "In" $in "NotIn" (printf "!%s" $in) "Exists" (printf "%s.hasValue()" $label) "DoesNotExist" (printf "!%s.hasValue()" $label)) .operator) -}}
{{- end -}}
({{ $all | default (list "true") | join " && " }})
{{- end -}}

{{- /* The items of an annotation, which separator separates. */ -}}
{{- define "detour.cel.requested" -}}
{{- $key := index . 0 | toJson -}}
variables.annotations[?{{ $key }}].or(variables.inherited[?{{ $key }}]).orValue('')
  .split('{{ index . 1 }}').map(item, item.trim() != '', item.trim())
{{- end -}}

{{- /* The items that the grants (first item of the list) permit under a key (second item). */ -}}
{{- define "detour.cel.items" -}}
{{- $key := index . 1 -}}
[]
{{- range index . 0 -}}
{{- $items := list -}}
{{- range (hasKey .keys $key | ternary (get .keys $key) list) -}}
{{- $isAddress := and (has $key (list "ip_ranges" "resolvers")) (regexMatch "^[0-9a-fA-F:.]*[:.][0-9a-fA-F:.]*$" .) -}}
{{- $items = append $items (ternary (printf "%s/%s" . (ternary "128" "32" (contains ":" .))) . $isAddress) -}}
{{- end -}}
{{- if $items }}
  + {{ include "detour.cel.if" (list .condition (toJson $items)) }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* The ranges of numbers that the grants permit under a key, [[first, last], ...]. The third item of the list is the
variable with the namespace's ranges. */ -}}
{{- define "detour.cel.ranges" -}}
{{- $key := index . 1 -}}
{{- $namespace := printf "variables.%s" (index . 2) -}}
{{- $words := dict "namespace-range" $namespace "namespace-range-first" (printf "%s.map(range, [%s[0][0], %s[0][0]])" $namespace $namespace $namespace) "namespace-range-last" (printf "%s.map(range, [%s[0][1], %s[0][1]])" $namespace $namespace $namespace) -}}
[]
{{- range $grant := index . 0 -}}
{{- $ranges := list -}}
{{- range $item := (hasKey .keys $key | ternary (get .keys $key) list) -}}
{{- if hasKey $words $item }}
  + {{ include "detour.cel.if" (list $grant.condition (get $words $item)) }}
{{- else if and (eq $item "*") (eq $key "ports") -}}
{{- $ranges = append $ranges (list 1 65535) -}}
{{- else if regexMatch "^[0-9]+( *- *[0-9]+)?$" $item -}}
{{- $numbers := splitList "-" (nospace $item) -}}
{{- $ranges = append $ranges (list (first $numbers | atoi) (last $numbers | atoi)) -}}
{{- else if regexMatch "^[0-9]+ */ *[0-9]+$" $item -}}
{{- $numbers := splitList "/" (nospace $item) -}}
{{- $ranges = append $ranges (list (first $numbers | atoi) (add (first $numbers | atoi) (last $numbers | atoi) -1)) -}}
{{- end -}}
{{- end -}}
{{- if $ranges }}
  + {{ include "detour.cel.if" (list .condition (toJson $ranges)) }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* A list, if the condition of a grant, which can be empty, is true. */ -}}
{{- define "detour.cel.if" -}}
{{- if index . 0 }}({{ index . 0 }} ? {{ index . 1 }} : []){{ else }}{{ index . 1 }}{{ end -}}
{{- end -}}

{{- /* The range of the UID or GID in the variable item, [[first, last]], or [] if it is none: 7, 7-9 or 7/3. */ -}}
{{- define "detour.cel.id" -}}
(item.matches(r'^0*[0-9]{1,10}(\s*-\s*0*[0-9]{1,10})?$')
  ? [[int(item.split('-')[0].trim()), int(item.substring(item.lastIndexOf('-') + 1).trim())]]
  : item.matches(r'^0*[0-9]{1,10}\s*/\s*0*[0-9]{1,10}$')
  ? [[int(item.split('/')[0].trim()), int(item.split('/')[0].trim()) + int(item.split('/')[1].trim()) - 1]]
  : []).filter(range, range[0] <= range[1] && range[1] < 4294967295)
{{- end -}}

{{- /* The ranges of the ports in the variable list, [[first, last], ...]; [] for each one that is malformed. */ -}}
{{- define "detour.cel.ports" -}}
.map(item, {'item': dyn(item), 'ranges': dyn((item == '*' ? [[1, 65535]]
  : item.matches(r'^0*[0-9]{1,5}(\s*-\s*0*[0-9]{1,5})?$')
  ? [[int(item.split('-')[0].trim()), int(item.substring(item.lastIndexOf('-') + 1).trim())]]
  : []).filter(range, 0 < range[0] && range[0] <= range[1] && range[1] < 65536))})
{{- end -}}

{{- /* Whether the bounds of a sub-plugin permit the range of ports in the variable port. */ -}}
{{- define "detour.cel.permitsPort" -}}
{{- if (index . 0).place -}}
variables.{{ index . 1 }}.exists(p, p[0] <= port.ranges[0][0] && port.ranges[0][1] <= p[1])
{{- else -}}
port.ranges[0][1] - port.ranges[0][0] < 1024
{{- end -}}
{{- end -}}

{{- /* The number of ports of all ranges in a list. */ -}}
{{- define "detour.cel.countedPorts" -}}
{{ . }}.filter(port, port.ranges.size() == 1).map(port, int(port.ranges[0][1]) - int(port.ranges[0][0]) + 1).sum()
{{- end -}}

{{- /* The numbers of addresses with a prefix of 8 to 32 bits. */ -}}
{{- define "detour.cel.addresses" -}}
{{- $all := list -}}
{{- $number := 16777216 -}}
{{- range until 25 -}}
{{- $all = append $all $number -}}
{{- $number = div $number 2 -}}
{{- end -}}
{{- $all | toJson -}}
{{- end -}}

{{- /* Whether the addresses and CIDRs of a list have more addresses than four prefixes of the length 8. Shorter prefixes
are denied anyway, and longer ones than 32 count as these. */ -}}
{{- define "detour.cel.exceedsAddresses" -}}
.map(item, isCIDR(item) ? cidr(item).prefixLength() : 32).filter(length, length >= 8)
  .map(length, {{ include "detour.cel.addresses" "" }}[length < 32 ? length - 8 : 24]).sum() > 67108864
{{- end -}}

{{- /* Whether the CIDR in the variable p contains the address or CIDR in item. */ -}}
{{- define "detour.cel.contains" -}}
isCIDR(p) && (isCIDR(item) ? cidr(p).containsCIDR(item) : isIP(item) && cidr(p).containsIP(item))
{{- end -}}

{{- /* The grants with containers, as a list of maps. */ -}}
{{- define "detour.cel.containers" -}}
[]
{{- range . -}}
{{- if .keys.containers }}
  + {{ include "detour.cel.if" (list .condition (printf "[{'containers': dyn(%s), 'kinds': dyn(%s)}]" (toJson .keys.containers) (hasKey .keys "kinds" | ternary .keys.kinds (list "init" "app") | toJson))) }}
{{- end -}}
{{- end -}}
{{- end -}}
