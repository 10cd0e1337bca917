package meshrl

// The vectors of proto/vectors, computed here from docs/contract.md.

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"reflect"
	"sort"
	"testing"

	"github.com/klauspost/compress/zstd"
	"google.golang.org/protobuf/proto"
	"lukechampine.com/blake3"
	pb "meshrl.dev/api/meshrl/v1"
)

// vectors reads a file of proto/vectors.
func vectors(t *testing.T, name string, into interface{}) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(os.Getenv("MESHRL_VECTORS"), name))
	if err == nil {
		err = json.Unmarshal(text, into)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func unhex(text string) []byte {
	data, err := hex.DecodeString(text)
	if err != nil {
		panic(err)
	}
	return data
}

func le(values ...interface{}) []byte {
	var out bytes.Buffer
	for _, value := range values {
		if err := binary.Write(&out, binary.LittleEndian, value); err != nil {
			panic(err)
		}
	}
	return out.Bytes()
}

// fields hashes canonical fields: text, bytes, int64 and []int64.
func fields(values ...interface{}) []byte {
	var out bytes.Buffer
	for _, value := range values {
		data, is := value.([]byte)
		if text, isText := value.(string); isText {
			data = []byte(text)
		} else if !is {
			data = le(value)
		}
		out.Write(le(uint64(len(data))))
		out.Write(data)
	}
	return out.Bytes()
}

func digest(data []byte) string {
	sum := blake3.Sum256(data)
	return hex.EncodeToString(sum[:])
}

func sum128(data []byte, first uint64) string {
	if len(data)%2 == 1 {
		data = append(append([]byte{}, data...), 0)
	}
	var lanes [2]uint64
	for i := 0; i < len(data); i += 2 {
		z := uint64(binary.LittleEndian.Uint16(data[i:])) + (first+uint64(i/2)+1)*0x9E3779B97F4A7C15
		z = (z ^ z>>30) * 0xBF58476D1CE4E5B9
		z = (z ^ z>>27) * 0x94D049BB133111EB
		z ^= z >> 31
		lanes[0] += z
		lanes[1] += (z ^ z>>29) * 0xD6E8FEB86659FD93
	}
	return hex.EncodeToString(le(lanes))
}

// entry is a tensor of a vector: name, element type, shape, and what else stands there.
type entry []interface{}

func (e entry) head() []interface{} {
	shape := []int64{}
	for _, length := range e[2].([]interface{}) {
		shape = append(shape, int64(length.(float64)))
	}
	return []interface{}{e[0], e[1], shape}
}

func hashed(domain string, tensors []entry) string {
	sorted := append([]entry{}, tensors...)
	sort.Slice(sorted, func(a, b int) bool { return sorted[a][0].(string) < sorted[b][0].(string) })
	values := []interface{}{domain}
	for _, tensor := range sorted {
		values = append(values, tensor.head()...)
		if len(tensor) > 3 {
			values = append(values, unhex(tensor[3].(string)))
		}
	}
	return digest(fields(values...))
}

// elementsOf are the values of a JSON list as the elements of a type.
func elementsOf(dtype string, values []interface{}) []byte {
	var out []byte
	for _, value := range values {
		switch dtype {
		case "bool":
			out = append(out, le(value.(bool))...)
		case "int32":
			out = append(out, le(int32(value.(float64)))...)
		case "int64":
			out = append(out, le(int64(value.(float64)))...)
		default:
			out = append(out, le(float32(value.(float64)))...)
		}
	}
	return out
}

func batchDigest(rows []map[string][]interface{}) string {
	always := [][2]string{
		{"token_ids", "int32"}, {"position_ids", "int32"}, {"loss_mask", "bool"}, {"advantages", "float32"},
		{"inference_logprobs", "float32"}, {"sample_offsets", "int64"}, {"temperatures", "float32"}, {"env_index", "int32"},
	}
	ifSet := []string{"rl_weights", "ce_weights", "ref_kl_weights", "ref_logprobs"}
	data := append([]byte("meshrl.batch.v1"), le(uint64(len(rows)))...)
	add := func(dtype string, values []interface{}) {
		data = append(data, fields(dtype)...)
		data = append(data, le(uint64(1), int64(len(values)))...)
		data = append(data, fields(elementsOf(dtype, values))...)
	}
	for _, row := range rows {
		for _, each := range always {
			add(each[1], row[each[0]])
		}
		for _, name := range ifSet {
			if values, is := row[name]; is {
				data = append(data, fields(name)...)
				add("float32", values)
			}
		}
	}
	return digest(data)
}

func TestDigests(t *testing.T) {
	var found struct {
		Blake3 []struct{ Bytes, Digest string }
		Crc32c []struct {
			Bytes  string
			Crc32c uint32
		}
		Sum128 []struct {
			Bytes, Digest string
			FirstWord     uint64 `json:"first_word"`
		}
		LayoutSignature []struct {
			Tensors   []entry
			Signature string
		} `json:"layout_signature"`
		ResultRoot []struct {
			Tensors []entry
			Root    string
		} `json:"result_root"`
		BatchDigest []struct {
			MicroBatches []map[string][]interface{} `json:"micro_batches"`
			Digest       string
		} `json:"batch_digest"`
	}
	vectors(t, "digests.json", &found)
	for _, each := range found.Blake3 {
		equal(t, digest(unhex(each.Bytes)), each.Digest)
	}
	for _, each := range found.Crc32c {
		equal(t, crc32.Checksum(unhex(each.Bytes), crc32.MakeTable(crc32.Castagnoli)), each.Crc32c)
	}
	for _, each := range found.Sum128 {
		equal(t, sum128(unhex(each.Bytes), each.FirstWord), each.Digest)
	}
	for _, each := range found.LayoutSignature {
		equal(t, hashed("meshrl.layout.v1", each.Tensors), each.Signature)
	}
	for _, each := range found.ResultRoot {
		equal(t, hashed("meshrl.root.v1", each.Tensors), each.Root)
	}
	for _, each := range found.BatchDigest {
		equal(t, batchDigest(each.MicroBatches), each.Digest)
	}
}

func TestManifests(t *testing.T) {
	var found struct {
		Manifests []struct {
			Case, Message string
			ArtifactID    string `json:"artifact_id"`
		}
	}
	vectors(t, "manifests.json", &found)
	for _, each := range found.Manifests {
		var manifest pb.Manifest
		if err := proto.Unmarshal(unhex(each.Message), &manifest); err != nil {
			t.Fatal(err)
		}
		equal(t, artifactID(&manifest), each.ArtifactID)
		again, err := proto.MarshalOptions{Deterministic: true}.Marshal(&manifest)
		if err != nil {
			t.Fatal(err)
		}
		equal(t, hex.EncodeToString(again), each.Message)
	}
}

func artifactID(m *pb.Manifest) string {
	base := int64(-1)
	if m.BaseVersion != nil {
		base = int64(*m.BaseVersion)
	}
	shape := func(lengths []int64) []int64 { return append([]int64{}, lengths...) }
	values := []interface{}{
		"meshrl.manifest.v1", m.RunId, int64(m.Epoch), int64(m.Version), []string{"", "full", "delta", "lora"}[m.Kind],
		[]string{"", "filesystem", "stream", "nccl"}[m.Transport], base, m.BaseRoot, m.ResultRoot, m.LayoutSignature, m.Codec,
		int64(len(m.Tensors)),
	}
	names := []string{
		"", "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "float8_e4m3",
		"float8_e5m2",
	}
	for _, each := range m.Tensors {
		values = append(values, each.Name, names[each.Dtype], shape(each.Shape), int64(each.Offset), int64(each.NumBytes), each.Digest)
	}
	values = append(values, int64(len(m.Chunks)))
	for _, each := range m.Chunks {
		values = append(values, int64(each.Offset), int64(each.Length), each.Digest)
	}
	values = append(values, int64(len(m.Files)))
	for _, each := range m.Files {
		values = append(values, each.Path, int64(each.Offset), int64(each.NumBytes))
	}
	if m.DigestAlgorithm != "" {
		values = append(values, "digest_algorithm", m.DigestAlgorithm)
	}
	if plan := m.Collective; plan != nil {
		values = append(values, "collective", int64(plan.NumSenders), int64(plan.BucketBytes), indices(plan.WholeTensors))
		if len(plan.ReorderedTensors) > 0 {
			values = append(values, "row_order", indices(plan.ReorderedTensors), indices(plan.RowOrder))
		}
	}
	if adapter := m.Adapter; adapter != nil {
		values = append(values, "adapter", int64(adapter.Rank), le(adapter.LoraAlpha), adapter.BaseModel, int64(len(adapter.TargetModules)))
		for _, each := range adapter.TargetModules {
			values = append(values, each)
		}
	}
	return digest(fields(values...))
}

func indices(values []uint32) []int64 {
	wide := []int64{}
	for _, value := range values {
		wide = append(wide, int64(value))
	}
	return wide
}

// TestDelta applies the deltas of both formats to their bases.
func TestDelta(t *testing.T) {
	for _, name := range []string{"deltas.json", "sparse_deltas.json"} {
		t.Run(name, func(t *testing.T) { leads(t, name) })
	}
}

func leads(t *testing.T, name string) {
	var found struct {
		Tensors []entry
		Result  [][2]int
		Delta   string
	}
	vectors(t, name, &found)
	last := found.Tensors[len(found.Tensors)-1]
	base := make([]byte, int(last[3].(float64)+last[4].(float64)))
	for i := range base {
		base[i] = byte(37 * i % 251)
	}
	copy(base[4:8], []byte{0, 0, 0, 0})
	result := append([]byte{}, base...)
	apply(t, unhex(found.Delta), result)
	changed := [][2]int{}
	for i := range base {
		if base[i] != result[i] {
			changed = append(changed, [2]int{i, int(result[i])})
		}
	}
	equal(t, changed, found.Result)
}

type piece struct {
	First, Elements, Changed            uint64
	Width, LowBits                      uint16
	GapBytes, EscapeBytes               uint32
	GapsFrame, StepsFrame, EscapesFrame uint32
}

func apply(t *testing.T, delta, stream []byte) {
	in := bytes.NewReader(delta)
	var header struct {
		Magic          [4]byte
		Format, Unused uint16
		Pieces         uint64
	}
	read(t, in, &header)
	equal(t, string(header.Magic[:]), "MRDL")
	pieces := make([]piece, header.Pieces)
	read(t, in, pieces)
	for _, each := range pieces {
		gaps, steps, escapes := unzstd(t, in, each.GapsFrame), unzstd(t, in, each.StepsFrame), unzstd(t, in, each.EscapesFrame)
		equal(t, uint32(len(gaps)), each.GapBytes)
		equal(t, uint32(len(escapes)), each.EscapeBytes)
		equal(t, uint64(len(steps)), each.Changed)
		lows := make([]byte, each.Changed*uint64(each.LowBits/8))
		read(t, in, lows)
		width, place := int(each.Width), 0
		for _, small := range steps {
			gap := 0
			for ; gaps[0] == 255; gaps = gaps[1:] {
				gap += 255
			}
			place += (gap + int(gaps[0])) << each.LowBits
			gaps = gaps[1:]
			if each.LowBits > 0 {
				place, lows = place+int(lows[0]), lows[1:]
			}
			zigzag := uint64(small) + 1
			if small == 255 {
				zigzag, escapes = number(escapes[:width])+1, escapes[width:]
			}
			at := int(each.First) + place*width
			move(stream[at:at+width], zigzag>>1^-(zigzag&1))
			place++
		}
	}
}

// move takes an element a step on in the order of values.
func move(element []byte, step uint64) {
	top := uint64(1) << (8*len(element) - 1)
	value := number(element)
	if value&top == 0 {
		value |= top
	} else {
		value = ^value
	}
	value += step
	if value&top != 0 {
		value &^= top
	} else {
		value = ^value
	}
	for i := range element {
		element[i] = byte(value >> (8 * i))
	}
}

func number(data []byte) uint64 {
	value := uint64(0)
	for i, each := range data {
		value |= uint64(each) << (8 * i)
	}
	return value
}

func unzstd(t *testing.T, in *bytes.Reader, length uint32) []byte {
	frame := make([]byte, length)
	read(t, in, frame)
	decoder, err := zstd.NewReader(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer decoder.Close()
	data, err := decoder.DecodeAll(frame, nil)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func TestCompletionFrames(t *testing.T) {
	var found struct {
		Frames []struct {
			RequestID    string `json:"request_id"`
			PromptTokens uint32 `json:"prompt_tokens"`
			Choices      []choice
			Bytes        string
		}
	}
	vectors(t, "completion_frames.json", &found)
	for _, each := range found.Frames {
		in := bytes.NewReader(unhex(each.Bytes))
		var header struct {
			Magic                             [4]byte
			Format, Unused                    uint16
			Choices, Prompt, IDBytes, Unused2 uint32
		}
		read(t, in, &header)
		equal(t, fmt.Sprintf("%s %d", header.Magic, header.Format), "MRCF 1")
		id := make([]byte, (header.IDBytes+7)/8*8)
		read(t, in, id)
		equal(t, string(id[:header.IDBytes]), each.RequestID)
		equal(t, header.Prompt, each.PromptTokens)
		equal(t, int(header.Choices), len(each.Choices))
		for _, expected := range each.Choices {
			equal(t, readChoice(t, in), expected)
		}
		equal(t, in.Len(), 0)
	}
}

type choice struct {
	TokenIDs      []int32    `json:"token_ids"`
	Logprobs      []float32  `json:"logprobs"`
	RawLogprobs   []float32  `json:"raw_logprobs"`
	VersionSpans  [][3]int64 `json:"version_spans"`
	PromptVersion *int64     `json:"prompt_version"`
	FinishReason  *string    `json:"finish_reason"`
	StopTokenID   *int64     `json:"stop_token_id"`
}

func readChoice(t *testing.T, in *bytes.Reader) choice {
	var header struct {
		Tokens, Spans uint32
		StopToken     int64
		Reason, What  uint8
		Unused        [6]byte
	}
	read(t, in, &header)
	found := choice{TokenIDs: make([]int32, header.Tokens), VersionSpans: [][3]int64{}}
	if header.StopToken >= 0 {
		found.StopTokenID = &header.StopToken
	}
	if header.Reason > 0 {
		found.FinishReason = &[]string{"", "stop", "length", "abort"}[header.Reason]
	}
	for i := uint32(0); i < header.Spans; i++ {
		var span struct {
			Start, End uint32
			Version    int64
		}
		read(t, in, &span)
		found.VersionSpans = append(found.VersionSpans, [3]int64{int64(span.Start), int64(span.End), span.Version})
	}
	if header.What&4 != 0 {
		found.PromptVersion = new(int64)
		read(t, in, found.PromptVersion)
	}
	read(t, in, found.TokenIDs)
	if header.What&1 != 0 {
		found.Logprobs = make([]float32, header.Tokens)
		read(t, in, found.Logprobs)
	}
	if header.What&2 != 0 {
		found.RawLogprobs = make([]float32, header.Tokens)
		read(t, in, found.RawLogprobs)
	}
	return found
}

func TestTensors(t *testing.T) {
	floats := &pb.Tensor{Dtype: pb.DataType_DATA_TYPE_FLOAT32, Shape: []int64{2}, Data: le([]float32{-0.5, 3})}
	values, err := Float32s(floats)
	equal(t, values, []float32{-0.5, 3})
	equal(t, err, nil)
	if _, err := Int32s(floats); err == nil {
		t.Error("floats were read as integers")
	}
	floats.Shape[0] = 3
	if _, err := Float32s(floats); err == nil {
		t.Error("a tensor with too few bytes was read")
	}
}

func read(t *testing.T, in *bytes.Reader, into interface{}) {
	t.Helper()
	if err := binary.Read(in, binary.LittleEndian, into); err != nil {
		t.Fatal(err)
	}
}

func equal(t *testing.T, found, expected interface{}) {
	t.Helper()
	if !reflect.DeepEqual(found, expected) {
		t.Errorf("found %v, expected %v", found, expected)
	}
}
